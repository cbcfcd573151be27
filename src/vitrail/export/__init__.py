"""A model → files that run without vitrail.

api.py               `export_model`: to ONNX, torch.export or AOTInductor, proved before written
kinds.py             what exports and engines are called, for options
onnx_file.py         a model as one ONNX file, with all that belongs to it
graph.py             an ONNX graph, written node by node
networks.py          the models in ONNX: ViT with its stems and pools, Mixer
resnets.py           the convolutional ones: BiT, and the hybrid's stem
layers.py            their layers; in whole numbers for int8
positions.py         position embeddings for a grid that is known when the graph runs
resizing.py          a resize as a matrix, worked out in the graph
pixels.py            preprocessing in the graph
programs.py          torch.export and AOTInductor
proof.py             an export compared with its model
guard.py             what int8 costs, measured on pictures
description.py       what a file says about itself
sessions.py          engines of onnxruntime, of a file or of a model
"""
