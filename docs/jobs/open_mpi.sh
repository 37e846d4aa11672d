#!/bin/sh
# (umask 077; lockstep secret > key), and the file to all hosts; then sh open_mpi.sh on the first one.
# The file `hosts` has a line for each host, the first one first: node-a slots=2
# A job that ends with 75 was stopped and has saved: start it again.
first=$(awk 'NR == 1 { print $1 }' hosts)

# One lockstep run on each host; it starts the processes there.
exec mpirun --hostfile hosts --map-by ppr:1:node --bind-to none \
  lockstep run --master-addr "$first" -n 2 --secret-file key ./train
