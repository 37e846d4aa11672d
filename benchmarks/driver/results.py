"""What a run has measured, and its form as JSON.

`series`: absolute values of one contender, one per round; on a shared machine they wander by a factor of three.
`figures`: ratios of two series of the same rounds; these are what is promised, and what two runs are compared by.
Names are dotted: what.ranks.size.who, as in all_reduce.2.25MiB.gloo. Ours are `lockstep`, on plain tensors, and `arena`, on
tensors in shared memory.
"""

import json
from dataclasses import dataclass, field

from benchmarks.driver import stats

FORMAT = 2  # 1: `lockstep` meant tensors in shared memory, and all_gather's size was that of its input


@dataclass
class Results:
    machine: dict
    options: dict = field(default_factory=dict)
    series: dict = field(default_factory=dict)
    figures: dict = field(default_factory=dict)
    skipped: list = field(default_factory=list)

    def add_series(self, name, unit, rounds):
        self.series[name] = {"unit": unit, "rounds": list(rounds)}

    def add_ratio(self, name, numerator, denominator, better="higher"):
        """A figure from two series' names. `better` says which way is good: higher or lower."""
        rounds = stats.paired_ratios(self.series[numerator]["rounds"], self.series[denominator]["rounds"])
        self.figures[name] = {"of": [numerator, denominator], "better": better, "rounds": rounds}

    def median(self, name):
        """Of a series or figure; None if it was not measured."""
        entry = self.series.get(name) or self.figures.get(name)
        return stats.summarize(entry["rounds"]).median if entry else None

    def to_json(self):
        return json.dumps({"format": FORMAT, "machine": self.machine, "options": self.options, "skipped": self.skipped,
                           "figures": with_summaries(self.figures), "series": with_summaries(self.series)}, indent=1)


def with_summaries(entries):
    answer = {}
    for name, entry in entries.items():
        summary = stats.summarize(entry["rounds"])
        answer[name] = {**entry, "median": summary.median, "low": summary.low, "high": summary.high}
    return answer


def load(path):
    """Reads what to_json() wrote. Raises ValueError that says what is wrong with the file."""
    try:
        with open(path) as file:
            document = json.load(file)
        if document["format"] != FORMAT:
            raise ValueError(f"{path} has format {document['format']}; this program reads format {FORMAT}")
        return Results(**{key: document[key] for key in ("machine", "options", "series", "figures", "skipped")})
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}") from None
    except (json.JSONDecodeError, KeyError, TypeError):
        raise ValueError(f"{path} is not a result of scripts/bench") from None
