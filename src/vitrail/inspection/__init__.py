"""A model and pictures → arrays → pictures of what it learned, and a page to walk through them.

findings.py    what can be found, as arrays
pictures.py    pictures as they are and as a model sees them
layers.py      the encoder layer by layer, with what its maps are made of
attention.py   attention over many pictures: distance, entropy, redundancy, norms
rollout.py     where the whole encoder looks
relevance.py   where it sees a class: by gradients
scoring.py     whether such maps tell the truth
weights.py     filters, positions and token mixing: what needs no picture
tokens.py      patch tokens as colors, neighbors, a data set as a map; relatives.py of a model's
drawing.py     arrays → images
folder.py      all of it as files; page.py as one page, of gallery.py (picture by picture),
               habits.py (over many), truth.py (whether maps are true), with plots.py to draw and
               browser.py to click through, browser_script.py its script
api.py         `vitrail.inspect_model`
"""
