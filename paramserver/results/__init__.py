"""The result of a job: gathered from the servers, summarised, judged. Used by roles, launch and the API."""
