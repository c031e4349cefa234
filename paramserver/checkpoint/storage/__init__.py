"""Where checkpoint files lie: folders of this machine, and URLs of object stores."""
