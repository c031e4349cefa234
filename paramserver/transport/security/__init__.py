"""Who may call whom: certificates, tokens, and the rule for each method."""
