"""The first module that multiprocessing's fork server imports. The import ties the server to its parent.

multiprocessing runs no other code of ours in the server.
"""

from omnizoo.parallel.parent_death import tie_server

tie_server()
