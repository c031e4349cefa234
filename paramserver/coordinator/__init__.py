"""The control process: members, plan, slices, status. No tensor passes through it."""
