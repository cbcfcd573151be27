"""Read a page as a browser would: its text, its tags, and what it requests."""

import re
import xml.etree.ElementTree as ET
from html.parser import HTMLParser
from itertools import pairwise

from vitrail.reports.figures import inline_svg

VOID = {"meta", "img", "br", "input", "link"}
LOOSE = {"html", "li"}  # may stay open
REQUESTING = ("src", "href", "xlink:href", "srcset", "action")


class Reader(HTMLParser):
    """The tags of a page, each of which is closed, its text, and its requests."""

    def __init__(self, text):
        super().__init__()
        self.open, self.seen, self.asked, self.said = [], [], [], []
        self.feed(text)
        assert self.open == [], self.open

    def handle_startendtag(self, tag, attrs):
        values = dict(attrs)
        self.seen.append((tag, values))
        self.asked += [values[name] for name in REQUESTING if name in values]

    def handle_starttag(self, tag, attrs):
        self.handle_startendtag(tag, attrs)
        if tag not in VOID | LOOSE:
            self.open.append(tag)

    def handle_endtag(self, tag):
        if tag not in LOOSE:
            assert self.open.pop() == tag, (tag, self.getpos())

    def handle_data(self, data):
        if not {"style"} & set(self.open):
            self.said.append(data)


def read_page(text):
    """Read a page that must request nothing and have its headings in order."""
    reader = Reader(text)
    assert all(value.startswith(("data:image/", "#")) for value in reader.asked)
    assert not re.search(r"https?://|@import|<link|url\((?!#)", text)
    levels = [int(tag[1]) for tag, _ in reader.seen if re.fullmatch("h[1-4]", tag)]
    assert [level for level in levels if level == 1] == levels[:1]
    assert all(b <= a + 1 for a, b in pairwise(levels))
    return reader


def read_figure(figure, themed=True):
    """The SVG as a tree; a themed figure has no colors that ignore the color scheme."""
    text = str(inline_svg(figure))
    assert not re.search(r"nan|\binf\b", text, re.IGNORECASE)
    assert not themed or not re.search("#[0-9a-f]{6}", re.sub(r"url\(#\w+\)", "", text))
    return ET.fromstring(text.replace("xlink:", ""))


def texts(root):
    return [element.text for element in root.iter("text")]


def tooltips(root):
    return [element.text for element in root.iter("title")]
