"""One pull per host: the workers of a host take weights from the one worker that pulls them."""
