"""The worker: a supervisor, worker processes, and children that can be killed.

supervisor            starts, watches, restarts and reloads the processes; status and metrics
  └── process         one event loop: pulls tasks, extends their claims, finishes them
        ├── threads   sync tasks, and the communication with the children
        ├── loop      async tasks, in an event loop of their own
        └── children  one task at a time, killed when its timeout has passed
"""
