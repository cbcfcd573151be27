"""A model over HTTP: pictures in, answers out, without losing its head when many ask at once.

settings.py      what may be set, and which limits hold
run.py           the process: models, socket, signals; connection.py what uvicorn lacks
app.py           the application; sending.py routes that take pictures, reading.py the others,
                 description.py what the OpenAPI file says of them, replies.py answers as JSON
guard.py         around every request: who may, what is logged, which headers
bodies.py        a request's body → pictures, within limits; room.py who may bring one in
batcher.py       one thread that does what waits, as many pictures at once as are there
readers.py       threads that decode images, within a shared pixel budget
house.py         everything the routes share; shelf.py the models by name, work.py what they do
lessons.py       classes taught while it runs; examples.py pictures to try
meters.py        numbers for Prometheus; logs.py a line for each request; refusals.py errors
looking.py       what a model looks at; page.py, docs_page.py what a browser sees
"""
