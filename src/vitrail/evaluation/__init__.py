"""A model and a data set → how good it is, and where it goes wrong.

passes.py        every picture once through a model, on any number of processes
outcome.py       what is cheap enough to be asked during training, and the sums it is made of
quick.py         the outcome of a model on a source
api.py           everything there is to say: `vitrail.evaluate`
pictures.py      which pictures are judged by, and whether the model may have learned from them
findings.py      what that is, as values
matching.py      whether model and data speak of the same classes
views.py         several looks at each picture
real.py          ImageNet-ReaL
assess.py        predictions → findings, from
  measures.py      precision, recall, F1, average precision, accuracy of the surest
  calibration.py   what confidence is worth, and the temperature that mends it
  bootstrap.py     how far each number can be trusted
verdict.py       findings in plain words
page.py          findings as a page, from parts.py, charts.py, diagrams.py and matrix.py
folder.py        the page, the numbers and every prediction as files
"""
