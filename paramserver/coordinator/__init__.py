"""The control process: members, plan, slices, status. Never on the path of a tensor."""
