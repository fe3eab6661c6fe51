"""Checkpoints: what a run needs to resume as if it had never stopped.

    RUN/checkpoints/STEP/
        actor/            parameters, optimizer state, counters (Orbax; any mesh to any mesh)
        rollout_I.npz     batch I, generated but not yet trained on
        model/            config.json and tokenizer of the policy
        config.yaml       every key of the run
        manifest.json     step, data cursor, schedule, accuracy, size and checksum of every file

The manifest is renamed into place last: a folder without one is the leftover of a killed save.
Nothing else is state: the order of the data, every sample and every coin are pure functions of
(`seed`, batch, prompt).
"""
