"""Commands before a run: settings, certificates, deployment files, the doctor, the simulator."""
