from pathlib import Path

from vitrail.planning.accelerators import UTILIZATION
from vitrail.planning.page import page
from vitrail.planning.wish import Wish

PAGE = Path(__file__).parents[2] / "docs" / "scale.md"


def test_the_page_about_scale_is_what_the_command_makes():
    wish = Wish(model="ViT-H/14", batch_size=4096, images=303e6, epochs=14)
    assert PAGE.read_text(encoding="utf-8") == page(wish, UTILIZATION), (
        "vitrail plan ViT-H/14 --images 303e6 --epochs 14 --page docs/scale.md makes it anew"
    )
