"""Makes events.bin: three records by TensorBoard's own writer (pip install tensorboard)."""
import io
import math
import os

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.record_writer import RecordWriter


out = io.BytesIO()
writer = RecordWriter(out)
values = [("loss", 5.5), ("rank_busy_s/3", 1e-3), ("grad_norm", math.nan)]
summary = Summary(value=[Summary.Value(tag=tag, simple_value=value) for tag, value in values])
time = 1_700_000_000.25
for event in [
    Event(wall_time=time, file_version="brain.Event:2"),
    Event(wall_time=time, step=301, session_log=SessionLog(status=SessionLog.START)),
    Event(wall_time=time, step=1 << 40, summary=summary),
]:
    writer.write(event.SerializeToString())
with open(os.path.join(os.path.dirname(__file__), "events.bin"), "wb") as file:
    file.write(out.getvalue())
