"""`lockstep sweep`: hyperparameters by Optuna, each trial a job of `lockstep run`. docs/sweep.md is its guide.

It stands outside the package `lockstep`, because `import lockstep` loads torch, which a sweep does not need.
"""
