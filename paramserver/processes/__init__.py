"""Child processes: started, read line by line, ended with their parent.

Imports nothing of ours. Launch, preload, roles, machine and testing use it.
"""
