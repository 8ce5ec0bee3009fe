"""The published numbers: complete, consistent with each other, and never guessed."""

import math

from analysis.tables import paper


def test_every_table_says_where_it_stands():
    for name in paper.tables():
        frame = paper.table(name)
        assert len(frame) > 0
        for key in ("where", "version", "metric", "data", "basis"):
            assert frame.attrs[key], f"{name} lacks {key}"
        assert frame.attrs["basis"] in ("seen", "secondary", "derived")
        assert frame.attrs["metric"] in paper.citation(name)


def test_main_deltas_are_differences_but_for_the_printed_slip():
    for row in paper.table("main").to_dict("records"):
        gap = round(row["dense"] - row["tread"], 2)
        assert row["delta"] == (16.02 if row["model"] == "SiT-B/2" else gap), row["model"]


def test_placement_is_baseline_plus_delta_for_sixteen_routes():
    frame = paper.table("placement")
    assert len(frame) == 16 and frame["route"].is_unique
    for row in frame.to_dict("records"):
        assert math.isclose(frame.attrs["baseline"] + row["delta"], row["fid"], abs_tol=0.005), row["route"]
    assert frame.loc[frame["fid"].idxmin(), "route"] == "2-8"


def test_tables_agree_where_they_repeat_a_number():
    main = paper.table("main").set_index("model")
    rate = paper.table("rate").set_index("rate")["fid"]
    assert rate[0.0] == main.loc["DiT-B/2", "dense"] and rate[0.5] == main.loc["DiT-B/2", "tread"]
    scaling = paper.table("scaling").set_index("kind")["fid"]
    assert scaling["absolute"] == main.loc["DiT-XL/2", "tread"]
    guidance = paper.table("guidance").set_index("key")
    assert guidance.loc["cfg", "gmacs"] == 2 * guidance.loc["none", "gmacs"]
    speed = paper.table("speed").set_index("method")["steps_per_s"]
    assert round(speed["TREAD"] / speed["DiT"], 2) == 1.63
