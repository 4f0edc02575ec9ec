"""Serve models and indexes over HTTP: ``irkit serve``, for the clients that people have already.

* server.py starts processes and ends them; app.py joins the routes; guard.py stands before all of them with
  limits, request ids, logs and metrics (meters.py), and access.py with keys.
* catalogue.py opens models and indexes, and finds them by name. served_models.py encodes texts of many
  requests together, and served_indexes.py searches for their queries together, both by batcher.py.
* tei_routes.py, openai_routes.py, search_routes.py and document_routes.py are the routes. messages.py has
  what they take, answers.py what they answer, and problems.py what they answer when something is wrong.
* connections.py closes connections whose clients let the server wait.

The room needs the extra ``serve``. Begin with app.py and batcher.py.
"""
