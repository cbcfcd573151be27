"""Models over HTTP.

config.py     options and limits
server.py     the process: loads models, binds the socket, handles signals
protocol.py   uvicorn with connection limits, drain and watchdog
app.py        the application: shared state, routes, middleware, pages
schemas.py    request and response schemas
limits.py     access checks, admission control, request bodies, errors
registry.py   the served models: explanations, taught classes, example images
batching.py   dynamic batching and image decoding threads
metrics.py    Prometheus metrics and the request log
assets/       the web pages' HTML, CSS and JavaScript
"""
