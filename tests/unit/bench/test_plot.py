"""Pictures are well-formed and show what they are given."""

from xml.etree import ElementTree

from tests.bench.plot import draw, panels
from tests.bench.svg import Picture

SVG = "{http://www.w3.org/2000/svg}"


def result(gpu: str | None, figures: dict[str, tuple[float, str]]) -> dict:
    return {
        "shape": "qwen3-8b",
        "machine": {"gpu": gpu, "cpu": "some <CPU> & more"},
        "figures": {
            name: {"median": value, "unit": unit} for name, (value, unit) in figures.items()
        },
    }


def test_words_and_tips_are_escaped():
    picture = Picture(100, 50, "a < b & 'c'")
    picture.text(1, 2, "<&>")
    picture.rect(0, 0, 5, 5, fill="#fff", tip="1 < 2")
    root = ElementTree.fromstring(str(picture))
    assert [text.text for text in root.iter(f"{SVG}text")] == ["<&>"]
    assert [title.text for title in root.iter(f"{SVG}title")] == ["a < b & 'c'", "1 < 2"]


def test_a_picture_is_written_whole(tmp_path):
    Picture(10, 10, "empty").write(tmp_path / "empty.svg")
    assert ElementTree.parse(tmp_path / "empty.svg").getroot().get("viewBox") == "0 0 10 10"


def test_panels_hold_figures_of_one_kind_beside_peer_and_floor():
    content = result("NVIDIA H200", {"decode, batch 1": (4.0, "ms/step"), "serving": (15.0, "s")})
    assert panels({"octavo": content}) == {
        "decode, ms/step": {"batch 1": {"octavo": 4.0, "peer": 5.21, "floor": 3.38}},
        "serving, s": {"serving": {"octavo": 15.0, "peer": 15.8, "floor": 9}},
    }


def test_two_results_share_a_panel():
    found = panels(
        {
            "before": result(None, {"decode, batch 1": (4.0, "ms/step")}),
            "after": result(None, {"decode, batch 1": (3.0, "ms/step")}),
        }
    )
    assert found == {"decode, ms/step": {"batch 1": {"before": 4.0, "after": 3.0}}}


def test_bars_are_as_high_as_their_values():
    content = result(None, {"decode, batch 1": (4.0, "ms"), "decode, batch 8": (8.0, "ms")})
    root = ElementTree.fromstring(str(draw({"octavo": content})))
    heights = [
        float(rect.get("height"))
        for rect in root.iter(f"{SVG}rect")
        if (tip := rect.find(f"{SVG}title")) is not None and tip.text.startswith("octavo")
    ]
    assert heights[1] == 2 * heights[0]
