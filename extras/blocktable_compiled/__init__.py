"""The host path of a steady step, compiled: the numpy path's results, in a hundredth of its time.

Built if there is a C++ compiler, and never needed. Each operation does all its checks before it changes anything, and
leaves what is out of the ordinary to the numpy path, which does the work, or raises the sentence that explains.
"""
