"""Where the bytes lie: the flat layout, its chunks, which server owns which, places in shared memory."""
