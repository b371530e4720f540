# SPDX-License-Identifier: BSD-3-Clause
"""The figures of bench_cluster.py, and its tables."""

from __future__ import annotations

from cluster import figures, tables
from cluster.player import Run


def test_figures() -> None:
    def run(*milliseconds: float, sent: float = 0, losses: list[float] | None = None) -> Run:
        return Run([], list(milliseconds), losses or [], sent, gradient_bytes=100)

    # The whole second round is slower. The difference by round does not see that.
    rounds = [
        {
            "none": run(10, 12, 11),
            "ddp-alone": run(9, 9, 9),
            "plain": run(31, 30, 32, sent=200),
            "hook": Run(["hung"]),
        },
        {
            "none": run(20, 22, 21),
            "ddp-alone": run(19, 19, 19, sent=1),
            "plain": run(41, 40, 42, sent=200),
        },
    ]
    learned = {"plain": [run(1, losses=[float(100 - step) for step in range(100)])]}
    compared = figures.compare(rounds, learned, figures.marks(learned, 70.0))
    assert compared["plain"]["above_none_ms"] == 20
    assert compared["plain"]["above_ddp_alone_ms"] == 22
    assert compared["ddp-alone"]["above_none_ms"] == -2
    assert "times_fewer_bytes" not in compared["ddp-alone"]
    assert compared["plain"]["step_ms"] == 36
    # The mean of the steps i-9 to i, counted from 0, is 100 - i + 4.5: at i = 35 it is 69.5.
    (mark,) = compared["plain"]["marks"]
    assert mark == {"steps_to_loss": [36], "seconds_to_loss": 36 * 36 / 1e3, "times_sooner": 1}
    assert compared["plain"]["final_loss"] == 5.5
    assert compared["hook"] == {"failures": ["hung"]}


def test_figures_over_seeds() -> None:
    """The times are medians, and a run that never reaches the loss is longer than any other."""
    falling = [[start - step for step in range(100)] for start in (100.0, 110.0, 1000.0)]
    learned = {"plain": [Run([], losses=losses) for losses in falling]}
    learned["plain"][0].failures.append("hung")
    rounds = [{"plain": Run([], [500.0, 500.0])}]
    plain = figures.compare(rounds, learned, figures.marks(learned, 70.0))["plain"]
    assert plain["failures"] == ["hung"]
    (mark,) = plain["marks"]
    assert mark["steps_to_loss"] == [36, 46, None]
    assert mark["seconds_to_loss"] == 23
    assert plain["final_loss"] == 110 - 99 + 4.5
    (never,) = figures.compare(rounds, learned, figures.marks(learned, 0.0))["plain"]["marks"]
    assert never["seconds_to_loss"] is None


def test_each_seed_is_timed_to_its_own_plain_run() -> None:
    """The losses of ours fall half as fast, and its steps take a fifth of the time."""
    starts = (100.0, 300.0, 500.0)
    learned = {
        "plain": [Run(losses=[start - step for step in range(100)]) for start in starts],
        "ours": [Run(losses=[start - step / 2 for step in range(150)]) for start in starts],
        "slow": [Run(losses=[start] * 150) for start in starts],
    }
    marks = figures.marks(learned, None)
    # The mean of the last ten losses is 4.5 above the last of them.
    assert [each[1] for each in marks.losses] == [300 - last + 4.5 for last in (24, 49, 74, 99)]
    assert marks.record()["loss"] == 300 - 99 + 4.5
    assert marks.record()["learning_steps"] == 100
    rounds = [
        {
            "plain": Run([], [500.0, 500.0]),
            "ours": Run([], [100.0, 100.0]),
            "slow": Run([], [100.0, 100.0]),
        }
    ]
    compared = figures.compare(rounds, learned, marks)
    marked = [mark["steps_to_loss"] for mark in compared["plain"]["marks"]]
    assert marked == [[steps] * 3 for steps in (25, 50, 75, 100)]
    # Counted from 0, plain is at start - i + 4.5 in step i, and ours at start - i / 2 + 2.25. So
    # ours reaches the loss of plain's step i in its step 2 i - 4.
    early, _, late, last = compared["ours"]["marks"]
    assert early["steps_to_loss"] == [2 * 24 - 4 + 1] * 3
    assert late["steps_to_loss"] == [2 * 74 - 4 + 1] * 3
    assert early["times_sooner"] == 25 * 5 / (2 * 24 - 4 + 1)
    assert last["steps_to_loss"] == [None] * 3  # it has trained for 150 steps
    assert last["times_sooner"] == 0
    assert compared["slow"]["marks"][-1]["seconds_to_loss"] is None
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
            "ours": Run(["hung"], [100.0], tx_bytes_per_step=2e5),
        }
    ]
    marks = figures.marks(learned, 60.0)
    setting = {"model": "demo", "ranks": 2, "rate": "1gbit", "delay_ms": 0, **marks.record()}
    setting["methods"] = figures.compare(rounds, learned, marks)
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
            ["none", "", "80 (80 to 80)", ""],
            ["plain all-reduce", "2.00", "500 (450 to 550)", ""],
            ["ours", "0.20", "100 (100 to 100)", ""],
        ],
    )
    assert [row[0] for row in tables.links(record, without=["plain"])[1]] == ["none", "ours"]
    titles = [title.partition(": ")[2] for title in tables.everything(record)]
    # With a given loss there are none on the way. The second link has failed.
    costs = ["what a method costs"] * 2
    assert titles == ["a step", "seconds to the loss of plain", *costs]
    # 36 and 41 steps.
    assert tables.learning({**record, "settings": [setting]}) == (
        ["method", "loss after 60 steps", "seconds to a loss of 60.00, 1 Gbit/s"],
        [
            ["plain all-reduce", "38.000", "19.2"],
            ["ours", "38.000", "3.9 (5.0 times sooner)"],
        ],
    )
    assert tables.costs(record, setting) == (
        ["method", "above none, ms", "times fewer bytes", "failed attempts"],
        [
            ["none", "", "", ""],
            ["plain all-reduce", "+420 (+420 to +420)", "1.0", ""],
            ["ours", "+20 (+20 to +20)", "10.0", "1"],
        ],
    )
