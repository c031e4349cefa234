"""Learning-rate schedulers that follow the job: where a schedule stands, who advances it, which rates are refused."""
