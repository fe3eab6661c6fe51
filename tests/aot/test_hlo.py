"""What is read from the text of a compiled program."""

from jaxrl.aot.hlo import read

PROGRAM = """\
HloModule jit_step

%body.1 (p: (s32[], bf16[8,16])) -> (s32[], bf16[8,16]) {
  %p = (s32[], bf16[8,16]{1,0}) parameter(0)
  %x = bf16[8,16]{1,0} get-tuple-element(%p), index=1
  %all-gather-start.1 = (bf16[8,16]{1,0}, bf16[16,16]{1,0}) all-gather-start(%x), dimensions={0}
  %fusion.1 = bf16[8,16]{1,0} fusion(%x), kind=kLoop, calls=%fused
  %all-gather-done.1 = bf16[16,16]{1,0} all-gather-done(%all-gather-start.1)
  %i = s32[] get-tuple-element(%p), index=0
  ROOT %t = (s32[], bf16[8,16]{1,0}) tuple(%i, %fusion.1)
}

%cond.1 (p: (s32[], bf16[8,16])) -> pred[] {
  %p = (s32[], bf16[8,16]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %n = s32[] constant(5)
  ROOT %less = pred[] compare(%i, %n), direction=LT
}

ENTRY %main (a: bf16[8,16]) -> f32[4,4] {
  %a = bf16[8,16]{1,0} parameter(0)
  %zero = s32[] constant(0)
  %init = (s32[], bf16[8,16]{1,0}) tuple(%zero, %a)
  %loop = (s32[], bf16[8,16]{1,0}) while(%init), condition=%cond.1, body=%body.1, \
backend_config={"known_trip_count":{"n":"5"}}
  %q = f32[4,4]{1,0} constant({...})
  %fmha = (f32[4,4]{1,0}, u8[64]{0}) custom-call(%q), custom_call_target="__cudnn$fmhaSoftmax"
  %r = f32[4,4]{1,0} get-tuple-element(%fmha), index=0
  %all-reduce-start.1 = f32[4,4]{1,0} all-reduce-start(%r), to_apply=%add
  ROOT %all-reduce-done.1 = f32[4,4]{1,0} all-reduce-done(%all-reduce-start.1)
}
"""


def test_collectives_in_a_loop_count_as_often_as_it_runs():
    found = read(PROGRAM)
    gather, reduce = found.collectives["all-gather"], found.collectives["all-reduce"]
    assert (gather.calls, gather.bytes) == (5, 5 * 16 * 16 * 2)
    assert (reduce.calls, reduce.bytes) == (1, 4 * 4 * 4)


def test_a_collective_is_overlapped_where_work_stands_between_its_start_and_its_end():
    found = read(PROGRAM)
    assert found.collectives["all-gather"].overlapped == found.collectives["all-gather"].bytes
    assert found.collectives["all-reduce"].overlapped == 0


def test_the_attention_kernel_and_what_graphs_leave_out():
    found = read(PROGRAM)
    assert found.attention == "cuDNN's flash attention"
    assert found.outside_graphs is None  # there is no graph at all
    graphed = PROGRAM.replace("%cond.1", "%command_buffer.1")
    assert read(graphed).outside_graphs == 1  # the fusion of the loop's body
    assert read(PROGRAM.replace("__cudnn$fmhaSoftmax", "other")).attention is None
