"""How much a run does: small by default, kernels where an interpreter or a simulator runs them, deep for a night."""

from __future__ import annotations

from dataclasses import dataclass, replace

from hypothesis import HealthCheck, settings


@dataclass(frozen=True)
class Profile:
    """Sizes of one run.

    Attributes:
        name: as `--profile` takes it.
        property_examples: examples of each Hypothesis property.
        machine_examples: histories that the state machine runs.
        machine_steps: longest of them, in operations.
        hostile_calls: calls of the API fuzzer for each backend, over all step paths and host paths.
        max_tokens: entries of a slot buffer.
        max_rows: rows of a table.
        max_columns: columns of a row.
        engine_steps: steps of a small engine whose table kernels check.
        has_host_tests: whether tests marked `host` run.
    """

    name: str
    property_examples: int
    machine_examples: int
    machine_steps: int
    hostile_calls: int
    max_tokens: int
    max_rows: int
    max_columns: int
    engine_steps: int = 40
    has_host_tests: bool = True

    def with_examples(self, examples: int) -> Profile:
        """Return the same profile with another number of examples, everywhere."""
        return replace(self, property_examples=examples, machine_examples=examples)

    def settings(self, examples: int) -> settings:
        """Return Hypothesis settings for a number of examples."""
        return settings(
            max_examples=examples,
            stateful_step_count=self.machine_steps,
            deadline=None,  # an emulated launch may take a tenth of a second, the first one seconds
            database=None,  # a suite leaves nothing behind in the caller's folder
            # A red run is the same run on every machine; a night looks for new ones.
            derandomize=self.name != "deep",
            print_blob=True,
            report_multiple_bugs=False,
            suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.large_base_example],
        )


SMALL = Profile("small", 30, 30, 15, 20_000, max_tokens=64, max_rows=8, max_columns=16)
KERNELS = replace(SMALL, name="kernels", property_examples=8, machine_examples=8, engine_steps=10, has_host_tests=False)
DEEP = Profile("deep", 500, 20_000, 30, 200_000, max_tokens=96, max_rows=12, max_columns=40)
PROFILES = {profile.name: profile for profile in (SMALL, KERNELS, DEEP)}

_current = SMALL


def current() -> Profile:
    """Return the profile of this run."""
    return _current


def use(profile: Profile) -> None:
    """Make `profile` the profile of this run: before any test module is imported, for Hypothesis reads it there."""
    global _current
    _current = profile
    settings.register_profile("blocktable", profile.settings(profile.property_examples))
    settings.load_profile("blocktable")
