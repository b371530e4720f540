# SPDX-License-Identifier: BSD-3-Clause
"""The figures of bench_cluster.py, and its tables."""

from __future__ import annotations

from cluster import figures, tables
from cluster.player import Run


def test_figures() -> None:
    def run(*milliseconds: float, sent: float = 0) -> Run:
        return Run([], list(milliseconds), [], sent, gradient_bytes=100)

    # The whole second round is slower. The difference by round does not see that.
    rounds = [
        {
            "none": run(10, 12, 11, sent=1),
            "plain": run(31, 30, 32, sent=200),
            "hook": Run(["hung"]),
        },
        {
            "none": run(20, 22, 21),
            "plain": run(41, 40, 42, sent=200),
        },
    ]
    learned = {"plain": [Run(losses=[float(100 - step) for step in range(100)])]}
    compared = figures.compare(rounds, learned, figures.target(learned))
    assert compared["plain"]["above_none_ms"] == 20
    assert "above_none_ms" not in compared["none"]
    assert "times_fewer_bytes" not in compared["none"]
    assert compared["plain"]["step_ms"] == 36
    assert compared["plain"]["final_loss"] == 5.5
    assert compared["plain"]["steps_to_loss"] == [100]
    assert compared["plain"]["seconds_to_loss"] == 100 * 36 / 1e3
    assert compared["plain"]["times_sooner"] == 1
    assert compared["hook"] == {"failures": ["hung"]}


def test_each_seed_is_timed_to_its_own_plain_run() -> None:
    """The losses of ours fall by 0.8 a step, and its steps take a fifth of the time."""
    starts = (100.0, 300.0, 500.0)
    learned = {
        "plain": [Run(losses=[start - step for step in range(100)]) for start in starts],
        "ours": [Run(losses=[start - 0.8 * step for step in range(150)]) for start in starts],
        "slow": [Run(["hung"], losses=[start] * 150) for start in starts],
    }
    target = figures.target(learned)
    # The mean of the last ten losses is 4.5 above the last of them.
    assert target.losses == [start - 99 + 4.5 for start in starts]
    assert target.record() == {"learning_steps": 100, "loss": 300 - 99 + 4.5}
    times = {"plain": [500.0, 500.0], "ours": [100.0, 100.0], "slow": [100.0, 100.0]}
    rounds = [{method: Run([], ms) for method, ms in times.items()}]
    compared = figures.compare(rounds, learned, target)
    assert compared["plain"]["steps_to_loss"] == [100] * 3
    # Counted from 0, ours is at start - 0.8 i + 3.6 in step i.
    assert compared["ours"]["steps_to_loss"] == [124] * 3
    assert compared["ours"]["seconds_to_loss"] == 12.4
    assert compared["ours"]["times_sooner"] == 100 * 5 / 124
    slow = compared["slow"]
    assert slow["failures"] == ["hung"] * 3
    assert (slow["steps_to_loss"], slow["seconds_to_loss"]) == ([None] * 3, None)
    assert slow["times_sooner"] == 0
    assert not figures.catches_up(learned["slow"][0], learned["plain"][0], 100)
    assert figures.catches_up(learned["plain"][0], learned["plain"][0], 100)


def test_losses_on_the_way_are_beyond_those_of_plain() -> None:
    plain = [Run(losses=[float(start - step) for step in range(60)]) for start in (90, 100)]
    ours = [Run(losses=[float(91 - step) for step in range(90)]), Run(["hung"])]
    found = {"plain": figures.losses(plain, 60), "ours": figures.losses(ours, 60)}
    # The mean of the last ten losses is 4.5 above the last of them.
    assert found["plain"]["30"] == [90 - 29 + 4.5, 100 - 29 + 4.5]
    assert found["ours"]["60"] == [91 - 59 + 4.5]
    record = {"titles": {"plain": "plain", "ours": "ours"}, "settings": []}
    (table,) = tables.everything({**record, "losses": {"demo, 2 ranks": found}}).values()
    assert table[0] == ["method", *map(str, range(6, 61, 6)), "beyond plain's"]
    assert [row[-2:] for row in table[1]] == [["40.500", "+0.000"], ["36.500", "-4.000"]]


def test_the_tables_show_links_times_and_seconds_to_the_loss() -> None:
    """Plain is timed at 0.5 s a step, and ours at 0.1. Both have the same losses."""
    runs = [Run(losses=[float(start - step) for step in range(60)]) for start in (90, 95)]
    learned = {"plain": runs, "ours": runs}
    rounds = [
        {
            "none": Run([], [80.0, 80.0]),
            "plain": Run([], [400.0, 500.0, 600.0], tx_bytes_per_step=2e6),
            "ours": Run(["hung"], [100.0], tx_bytes_per_step=2e5, payload_bytes=160_000),
        }
    ]
    target = figures.target(learned)
    setting = {"model": "demo", "ranks": 2, "rate": "1gbit", "delay_ms": 0, **target.record()}
    setting["methods"] = figures.compare(rounds, learned, target)
    record = {
        "titles": {"none": "none", "plain": "plain all-reduce", "ours": "ours"},
        "settings": [
            setting,
            {**setting, "delay_ms": 0.1, "methods": {"ours": {"failures": ["hung"]}}},
        ],
    }
    assert tables.links(record) == (
        ["method", "sent per step, MB", "1 Gbit/s, ms", "1 Gbit/s, 0.1 ms, ms"],
        [
            ["none", "", "80", ""],
            ["plain all-reduce", "2.00", "500", ""],
            ["ours", "0.20", "100", ""],
        ],
    )
    shared = {**record, "settings": [{**setting, "ranks": 8, "per_host": 4}]}
    assert tables.links(shared)[0] == ["method", "sent per step, MB", "payloads", "1 Gbit/s, ms"]
    assert [row[1:3] for row in tables.links(shared)[1]] == [
        ["", ""],
        ["2.00", ""],
        ["0.20", "1.25"],
    ]
    assert next(iter(tables.everything(shared))) == "demo, 8 ranks, 4 per host: a step"
    titles = [title.partition(": ")[2] for title in tables.everything(record)]
    # The second link has failed.
    costs = ["what a method costs"] * 2
    assert titles == ["a step", "seconds to the loss of plain", *costs]
    assert tables.learning({**record, "settings": [setting]}) == (
        ["method", "loss after 60 steps", "seconds to a loss of 38.00, 1 Gbit/s"],
        [
            ["plain all-reduce", "38.000", "30.0"],
            ["ours", "38.000", "6.0 (5.0 times sooner)"],
        ],
    )
    assert tables.costs(record, setting) == (
        [
            "method",
            "step, ms",
            "above none, ms",
            "payloads",
            "times fewer bytes",
            "failed attempts",
        ],
        [
            ["none", "80 (80 to 80)", "", "", "", ""],
            ["plain all-reduce", "500 (450 to 550)", "+420 (+420 to +420)", "", "1.0", ""],
            ["ours", "100 (100 to 100)", "+20 (+20 to +20)", "1.25", "10.0", "1"],
        ],
    )
