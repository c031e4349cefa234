"""The bulk transport: weights and gradients over sockets of their own, sent from where they lie.

gRPC keeps control: a caller asks for a connection by an ordinary call (`Shard.OpenBulk`), which is authorised like every
other one. The answer has a port and a token that opens one connection. A connection carries one call after the other.
For workers and servers; who may import it: `connecting`, `roles.serving`, tests and benchmarks.
"""
