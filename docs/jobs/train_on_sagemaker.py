"""(umask 077; lockstep secret > source/key); pip install 'sagemaker<3'; python train_on_sagemaker.py

The folder `source` holds the program, the key and this script, start.sh:

    exec lockstep run -n 2 --secret-file key ./train

It is uploaded: who may read the bucket can read the key. Not run by the project's tests.
"""

from sagemaker.estimator import Estimator

# The image has lockstep and SageMaker's training toolkit, which starts start.sh once on each instance.
job = Estimator(
    image_uri="registry.example.com/train",
    role="arn:aws:iam::000000000000:role/train",
    instance_type="ml.c5.9xlarge",
    instance_count=2,
    entry_point="start.sh",
    source_dir="source",
    # What the program saves there is there again when the job is started anew.
    checkpoint_s3_uri="s3://example/train",
    checkpoint_local_path="/opt/ml/checkpoints",
    # After a fault of SageMaker's own it starts the job again, so many times; one that ends with 75 is to be submitted again.
    max_retry_attempts=5,
    max_run=3600,
)
job.fit()
