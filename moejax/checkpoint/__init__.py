"""Reading and writing the folder of FORMAT.md section 5. Names and arrays; knows no model."""

from moejax.checkpoint.reader import Checkpoint as Checkpoint
from moejax.checkpoint.sensitivity import Sensitivity as Sensitivity
from moejax.checkpoint.writer import CheckpointWriter as CheckpointWriter
from moejax.checkpoint.writer import ExpertFile as ExpertFile
