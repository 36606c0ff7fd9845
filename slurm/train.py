"""Handwritten digits, with options: mpidist run -n 2 slurm/train.py --learning-rate 0.1"""

import argparse

import mpidist as md
from mpidist.demo import train

parser = argparse.ArgumentParser()
parser.add_argument("--learning-rate", type=float, default=0.05)
parser.add_argument("--epochs", type=int, default=10)
options = parser.parse_args()
comm = md.init()
result = train(comm, epochs=options.epochs, learning_rate=options.learning_rate, reference=False)
if comm.rank == 0:
    print(f"learning rate {options.learning_rate}: {100 * result.accuracy:.1f} % right")
