"""Reads a page as a browser would: what it says, and what it asks for."""

from html.parser import HTMLParser

VOID = {"meta", "img", "br"}
LOOSE = {"html", "li"}  # may stay open


class Reader(HTMLParser):
    """Every tag is closed; what is asked of the network is noted."""

    def __init__(self, text):
        super().__init__()
        self.open, self.seen, self.asked, self.said = [], [], [], []
        self.feed(text)
        assert self.open == [], self.open

    def handle_starttag(self, tag, attrs):
        values = dict(attrs)
        self.seen.append((tag, values))
        asked = [values.get(name) for name in ("src", "href", "srcset", "action")]
        self.asked += [value for value in asked if value is not None]
        if tag not in VOID | LOOSE:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.seen.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        if tag not in LOOSE:
            assert self.open.pop() == tag, (tag, self.getpos())

    def handle_data(self, data):
        if not {"style"} & set(self.open):
            self.said.append(data)
