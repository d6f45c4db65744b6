"""The same methods across machines, on Flower's deployment engine: `pip install "foogd[flower]"`.

The server runs the simulator's own round; only the part of an engine that trains clients is another one, which sends
messages. A node runs the simulator's own local training on its own images.
"""
