"""A job over HTTP: the models of `/api/v1`, which `paramserver status --json` prints, too, and what serves them."""
