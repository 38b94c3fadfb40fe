"""The first module that multiprocessing's fork server imports. The import makes the server end with its parent.

An import is the only way to run our code in the server.
"""

from omnizoo.parallel.parent_death import tie_server

tie_server()
