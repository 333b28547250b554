# cython: language_level=3, boundscheck=False, wraparound=False, initializedcheck=False
# cython: freethreading_compatible=True
# distutils: language=c++
"""A step's graph, launched by the driver's functions themselves: what ctypes adds to each call is a third of a step."""

from libc.stdint cimport int32_t, int64_t, uint64_t
from libcpp.vector cimport vector

import struct

cdef extern from "Python.h":
    object PyNumber_Index(object value)
    long long PyLong_AsLongLong(object value) except? -1
    unsigned long long PyLong_AsUnsignedLongLong(object value) except? 0xFFFFFFFFFFFFFFFF

ctypedef int (*SetParams)(void* graph, void* node, void* params) noexcept nogil
ctypedef int (*LaunchGraph)(void* graph, void* stream) noexcept nogil


cdef class ArgumentWriter:
    """Writes a kernel's arguments where they lie, as `KernelArguments.set` does.

    Args:
        layout: a letter for each argument, as `KernelArguments` takes them.
        places: address of each argument; of one by value ("S"), of what points to it.
    """

    cdef bytes layout
    cdef vector[uint64_t] places

    def __init__(self, str layout not None, places):
        self.layout = layout.encode()
        self.places = [int(place) for place in places]
        if self.places.size() != <size_t>len(self.layout):
            raise ValueError("layout and places must be of one length")

    def set(self, values):
        """Write all of them; one that does not fit its type raises struct.error, and then any may be written."""
        cdef tuple given = tuple(values)
        cdef const char* kinds = self.layout
        cdef size_t i, place
        cdef int64_t value
        if <size_t>len(given) != self.places.size():
            raise struct.error(f"{self.places.size()} arguments are needed, got {len(given)}")
        try:
            for i in range(self.places.size()):
                place = self.places[i]
                if kinds[i] == b"i":
                    value = PyLong_AsLongLong(given[i])
                    if value != <int32_t>value:
                        raise struct.error(f"argument {i} does not fit 32 bits: {value}")
                    (<int32_t*>place)[0] = <int32_t>value
                elif kinds[i] == b"q":
                    (<int64_t*>place)[0] = PyLong_AsLongLong(given[i])
                else:
                    (<uint64_t*>place)[0] = PyLong_AsUnsignedLongLong(PyNumber_Index(given[i]))
        except (OverflowError, TypeError) as error:
            raise struct.error(f"argument {i} is not what the layout {self.layout.decode()!r} takes") from error


cdef class GraphLauncher:
    """Launches one graph; its nodes get new parameters before.

    Args:
        graph: the `StepGraph`; it owns what this points to.
        set_params, launch: addresses of cuGraphExecKernelNodeSetParams and cuGraphLaunch.
        exec_address: of the executable graph.
        nodes: handle of each node.
    """

    cdef object graph, rest
    cdef list present
    cdef SetParams set_params
    cdef LaunchGraph launch
    cdef void* exec_graph
    cdef vector[uint64_t] nodes

    def __init__(self, graph, uint64_t set_params, uint64_t launch, uint64_t exec_address, nodes):
        self.graph, self.rest = graph, ()
        self.set_params, self.launch = <SetParams><size_t>set_params, <LaunchGraph><size_t>launch
        self.exec_graph = <void*><size_t>exec_address
        self.nodes = [int(node) for node in nodes]
        self.present = [None] * len(nodes)

    def run(self, tuple first not None, rest, stream, *, bint is_refilled=False):
        """Launch the graph, as `StepGraph.run` does."""
        cdef Py_ssize_t index = 0
        cdef int error
        cdef void* on = <void*><size_t><uint64_t>stream
        if first is not self.present[0] or is_refilled:
            self._set(0, first)
        if rest is not self.rest:
            self.rest = ()  # until all of them are set
            for launch in rest:
                index += 1
                if launch is not self.present[index]:
                    self._set(index, launch)
            self.rest = rest
        with nogil:  # it waits where a thousand launches are queued
            error = self.launch(self.exec_graph, on)
        if error:
            self.graph.refuse(error)

    cdef int _set(self, Py_ssize_t index, tuple launch) except -1:
        cdef uint64_t params
        cdef int error
        node = self.graph.node(index, launch)
        params = node.params_address
        error = self.set_params(self.exec_graph, <void*><size_t>self.nodes[index], <void*><size_t>params)
        if error:
            self.graph.refuse(error)
        self.present[index] = launch
        return 0
