"""Models over HTTP.

config.py     options and limits
server.py     the process: loads models, binds the socket, handles signals
protocol.py   uvicorn with connection limits, drain and watchdog
app.py        the FastAPI application: routes, middleware, pages
state.py      what the routes share, warm-up, and stuck threads
schemas.py    request and response schemas
limits.py     access checks, admission control, request bodies, errors
registry.py   the served models by name, and example images
batching.py   dynamic batching and image decoding threads
teaching.py   classes added by clients
overlay.py    explanations and attention maps
metrics.py    Prometheus metrics and the request log
assets/       the web pages' HTML, CSS and JavaScript
"""
