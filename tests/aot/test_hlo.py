"""What is read from the text of a compiled program."""

from jaxrl.aot.hlo import read_program, read_thunks, read_total

PROGRAM = """\
HloModule jit_step

%fused (y: bf16[8,16]) -> bf16[8,16] {
  %y = bf16[8,16]{1,0} parameter(0)
  %square = bf16[16,16]{1,0} constant({...})
  ROOT %dot.1 = bf16[8,16]{1,0} dot(%y, %square), lhs_contracting_dims={1}
}

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
    found = read_program(PROGRAM)
    gather, reduce = found.collectives["all-gather"], found.collectives["all-reduce"]
    assert (gather.calls, gather.bytes) == (5, 5 * 16 * 16 * 2)
    assert (reduce.calls, reduce.bytes) == (1, 4 * 4 * 4)


def test_a_collective_is_overlapped_where_work_stands_between_its_start_and_its_end():
    found = read_program(PROGRAM)
    assert found.collectives["all-gather"].overlapped == found.collectives["all-gather"].bytes
    assert found.collectives["all-reduce"].overlapped == 0


COMBINED = """\
ENTRY %main (a: bf16[8,16], b: bf16[8,4]) -> f32[4,4] {
  %a = bf16[8,16]{1,0} parameter(0)
  %b = bf16[8,4]{1,0} parameter(1)
  %all-gather-start = ((bf16[8,16]{1,0}, bf16[8,4]{1,0}), (bf16[16,16]{1,0}, bf16[16,4]{1,0})) \
all-gather-start(%a, %b), channel_id=1, dimensions={0}
  %all-gather-done = (bf16[16,16]{1,0}, bf16[16,4]{1,0}) all-gather-done(%all-gather-start)
  %c = f32[8,4]{1,0} constant({...})
  %d = f32[8,2]{1,0} constant({...})
  %all-reduce-start = (f32[8,4]{1,0}, f32[8,2]{1,0}) all-reduce-start(%c, %d), to_apply=%add
  %all-reduce-done = (f32[8,4]{1,0}, f32[8,2]{1,0}) all-reduce-done(%all-reduce-start)
  %reduce-scatter = (f32[4,4]{1,0}, f32[4,2]{1,0}) reduce-scatter(%c, %d), to_apply=%add
  ROOT %first = f32[4,4]{1,0} get-tuple-element(%reduce-scatter), index=0
}
"""


def test_collectives_that_xla_combines_count_with_all_their_arrays():
    """The larger of operands and results: of a gather the results, of a scatter the operands."""
    found = read_program(COMBINED).collectives
    assert {kind: each.bytes for kind, each in found.items()} == {
        "all-gather": 16 * (16 + 4) * 2,
        "all-reduce": 8 * (4 + 2) * 4,
        "reduce-scatter": 8 * (4 + 2) * 4,
    }


def test_a_sum_of_scalars_hides_no_collective():
    """Nor does a slice that is written in place; what writes as many bytes does."""
    text = PROGRAM.replace("dot(%y, %square), lhs_contracting_dims={1}", "{}")
    shares = {}
    for name, inside, result in (
        ("scalar", "negate(%y)", "s32[]"),
        ("slice", "dynamic-update-slice(%y, %y)", "bf16[64,16]{1,0}"),
        ("large", "negate(%y)", "bf16[64,16]{1,0}"),
    ):
        fusion = f"%fusion.1 = {result} fusion(%x)"
        program = text.replace("{}", inside).replace(
            "%fusion.1 = bf16[8,16]{1,0} fusion(%x)", fusion
        )
        found = read_program(program).collectives["all-gather"]
        shares[name] = found.overlapped / found.bytes
    assert shares == {"scalar": 0.0, "slice": 0.0, "large": 1.0}


def test_the_attention_kernel():
    assert read_program(PROGRAM).attention == "cuDNN's flash attention"
    assert read_program(PROGRAM.replace("__cudnn$fmhaSoftmax", "other")).attention is None


THUNKS = """\
001: kCopy  [source       | next=003 (2)] kCopy
003: kWhile [prev=002 (1) | sink        ]
condition:
    004: kCustomKernel [source | sink] loop_and_fusion grid: [1, 1, 1]
  body:
    005: kCopy         [source       | next=007 (2)] kCopy
    007: kWhile        [prev=005 (2) | sink        ]
condition:
        008: kCustomKernel [source | sink] loop_compare_fusion grid: [1, 1, 1]
      body:
        000: kCommandBuffer [source | sink]
            009: kCustomKernel [source       | sink        ] loop_add_fusion grid: [1, 1, 1]
            010: kGemm         [source       | next=011 (1)] gemm_fusion_dot
        012: kCustomKernel [source | sink] another
013: kCustomKernel [source | sink] after the loop
"""


def test_what_the_host_launches_in_loops_is_what_no_graph_holds():
    """Two conditions, a copy of the outer loop, a kernel beside the graph; not what is outside."""
    found = read_thunks(THUNKS)
    assert (found.graphs, found.inside, found.outside) == (1, 2, 4)


MEMORY = """\
Memory Space: default (color=0)
Total bytes: 2177017856 (2.03GiB)
  cumulative_size;       size;       offset; used_by_n_values; shapes_list
    1.01GiB(100%);    1.01GiB;            0;                1; bf16[151936,3584]

Memory Space: vmem (color=1)
Total bytes: 41193472 (39.29MiB)
"""


def test_the_memory_of_a_tpu_program_is_that_in_hbm():
    assert read_total(MEMORY) == 2177017856
