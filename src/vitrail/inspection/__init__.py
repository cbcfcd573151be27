"""A model and pictures → arrays → pictures of what it learned, and a page to walk through them.

findings.py    what can be found, as arrays
pictures.py    pictures as they are and as a model sees them
layers.py      the encoder layer by layer, with what its maps are made of
attention.py   attention over many pictures: distance, entropy, redundancy, norms
rollout.py     where the whole encoder looks
relevance.py   where it sees a class: by gradients
scoring.py     whether such maps tell the truth
weights.py     filters, positions and token mixing: what needs no picture
tokens.py      patch tokens as colors, neighbors, a data set as a map
drawing.py     arrays → images: the only file that draws
folder.py      all of it as files; page.py as one page, with browser.py to click through
api.py         `vitrail.inspect_model`
"""
