package graph_test

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/internal/testkit/progtext"
)

// sound is a valid program that has an in-place gather, several streams, an accumulating loop that
// feeds the next repetition's copy in, padding, host twins, a skip flag and a workspace.
const sound = progtext.Header + `
mesh data=4
events 6
role tokens tokens
role loss loss
unit fc flat=1024
  segment fc.w len=640
  value value/fc name=value axis=-1 len=1024
  compute value/fc name=value axis=-1 len=1024
param fc.w [64,10] normal std=0.02 unit=fc decay value=fc.w
buffer host/tokens i32 [2,8] host inputs run port=tokens
buffer host/loss f64 [1] host inputs run port=loss
buffer tokens i32 [2,8] device inputs step
buffer seen i32 [2,8] device activations phase
buffer loss f64 [1] device activations step
buffer value/fc f32 [1024] device parameters run unit=fc pad=1536
buffer fc.w f32 [64,10] device parameters run unit=fc view=value/fc
buffer own f32 [256] device parameters run unit=fc view=value/fc stride=1024
buffer x f32 [16,64] device activations phase
buffer y f32 [16,10] device activations phase
buffer z f32 [16,10] device activations step
buffer ws u8 [64] device workspace phase
buffer flag i32 [1] device inputs run
section step
phase start ×1
  zero: fill -> loss {} record=4
phase micro ×3
  tokens/in: copy host/tokens -> tokens @copy-in wait=4 record=1
  x: fill -> x {Value=1}
  see: copy tokens -> seen wait=1
  fc: linear x fc.w _ -> y {} work=ws
  z: copy y -> z skip=flag
  sum: sum z -> +loss record=4
phase update ×1
  gather: all_gather own -> value/fc {} @comm wait=4 record=2
  done: join -> wait=2 record=3
  loss/out: copy loss -> host/loss @copy-out wait=3
section init
phase init ×1
  flag: fill -> flag {}
  w: fill -> value/fc {}
`

// edit replaces lines of sound. Each pair holds the beginning of a line, after spaces, and its
// replacement.
func edit(t *testing.T, pairs ...string) string {
	lines := strings.Split(sound, "\n")
	for i := 0; i < len(pairs); i += 2 {
		found := false
		for k, l := range lines {
			if strings.HasPrefix(strings.TrimSpace(l), pairs[i]) {
				lines[k], found = pairs[i+1], true
				break
			}
		}
		require.True(t, found, "no line starts with %q", pairs[i])
	}
	return strings.Join(lines, "\n")
}

func TestVerify(t *testing.T) {
	for _, c := range []struct {
		name  string
		edits []string
		err   string // "": none
	}{
		{"sound", nil, ""},

		// Order.
		{"wait removed", []string{"see:", "  see: copy tokens -> seen"},
			`step/micro/see: reads "tokens" on stream compute, and step/micro/tokens/in writes it on stream copy-in with no event that orders the two`},
		{"loop-carried wait removed", []string{"tokens/in:", "  tokens/in: copy host/tokens -> tokens @copy-in record=1"},
			`step/micro/tokens/in: writes "tokens" on stream copy-in, and step/micro/see reads it on stream compute in the repetition before with no event that orders the two`},
		{"view and base", []string{"gather:", "  gather: all_gather own -> value/fc {} @comm record=2"},
			`step/update/gather: writes "value/fc" on stream comm, and step/micro/fc reads "fc.w" on stream compute with no event that orders the two`},
		{"across phases", []string{"loss/out:", "  loss/out: copy loss -> host/loss @copy-out"},
			`step/update/loss/out: reads "loss" on stream copy-out, and step/micro/sum writes it on stream compute with no event`},
		{"event without a record", []string{"zero:", "  zero: fill -> loss {}"},
			`step/micro/tokens/in: waits for event 4, which no operation of the section records before it`},
		{"collectives on two streams", []string{"done:", "  done: join -> wait=2 record=3\n  other: all_reduce -> ~x {}"},
			`step/update/other: is a collective on stream compute, and gather of the same group (mesh axis 0) on stream comm`},
		{"collectives of two groups on two streams", []string{"x:", "  x: fill -> x {Value=1}\n  other: all_reduce -> ~x {Axis=-1}"}, ""},

		// Contents.
		{"read before write", []string{"x:", "  other: fill -> seen {}"},
			`step/micro/fc: reads "x", which no operation of the section writes before it`},
		{"read after its phase", []string{"done:", "  done: copy y -> z wait=2 record=3"},
			`step/update/done: reads "y", which lives for a phase and was last written in step/micro/fc`},
		{"nothing lasts from run to run", []string{"zero:", "  zero: fill -> loss {} record=4\n  z: copy z2 -> z3", "buffer ws", "buffer ws u8 [64] device workspace phase\nbuffer z2 f32 [1] device activations step\nbuffer z3 f32 [1] device activations step"},
			`step/start/z: reads "z2", which no operation of the section writes before it`},
		{"read of a part not written", []string{"x:", "  x: fill -> half {Value=1}", "buffer x", "buffer x f32 [16,64] device activations phase\nbuffer half f32 [8,64] device activations phase view=x"},
			`step/micro/fc: reads "x", of which 2048 bytes were not written before it, want at most the 0 of padding; the last write is step/micro/x`},
		{"padding needs no writer", []string{"x:", "  x: fill -> half {Value=1}", "buffer x", "buffer x f32 [16,64] device activations phase pad=2048\nbuffer half f32 [8,64] device activations phase view=x"}, ""},
		{"state that nothing fills", []string{"flag: fill", "", "buffer flag", "buffer flag i32 [1] device optimizer run"},
			`step/micro/z: reads "flag", which no operation writes and the host does not fill`},
		{"host twin that does not last", []string{"buffer host/loss", "buffer host/loss f64 [1] host inputs step port=loss"},
			`buffer host/loss: lives for a step, want run`},

		// Single operations.
		{"kind table", []string{"fc:", "  fc: linear x fc.w _ -> loss {}"}, `step/micro/fc: (linear): operand y (loss) is f64`},
		{"attribute type", []string{"fc:", "  fc: linear x fc.w _ -> y ScaleAttr{Factor=2}"}, `step/micro/fc: (linear): attribute is graph.ScaleAttr, want graph.LinearAttr`},
		{"operand index", []string{"fc:", "  fc: linear %99 fc.w _ -> y {}"}, `step/micro/fc: input 0 is buffer 99, want one of the program's 13`},
		{"event index", []string{"done:", "  done: join -> wait=7 record=3"}, `step/update/done: waits for event 7, want one of 1 to 6`},
		{"stream", []string{"done:", "  done: join -> wait=2 record=3 @stream(9)"}, `step/update/done: stream(9) is not one of the 7 streams`},
		{"two ports of one name", []string{"buffer host/loss", "buffer host/loss f64 [1] host inputs run port=loss\nbuffer again f64 [1] host inputs run port=loss"},
			`buffers host/loss and again are both the port loss of micro-batch 0, want one`},
		{"a port on the device", []string{"buffer loss", "buffer loss f64 [1] device activations step port=grad-norm"}, `buffer loss is the port grad-norm and lies in device memory, want host`},
		{"a port's type", []string{"buffer host/tokens", "buffer host/tokens i64 [2,8] host inputs run port=tokens"}, `buffer host/tokens is the port tokens and i64, want i32`},
		{"two memory spaces", []string{"see:", "  see: add y y -> y2 wait=1", "buffer ws", "buffer ws u8 [64] device workspace phase\nbuffer y2 f32 [16,10] host activations phase"},
			`step/micro/see: y is in device memory and y2 in host, want one memory space`},
		{"disk", []string{"buffer x", "buffer x f32 [16,64] disk activations phase"}, `step/micro/x: x is on disk, which only copies reach`},
		{"skip flag", []string{"z:", "  z: copy y -> z skip=tokens"}, `step/micro/z: skip flag tokens is i32 [2 8], want one i32`},
		{"workspace", []string{"buffer ws", "buffer ws u8 [64] device workspace phase\nbuffer x2 f32 [16] device workspace phase view=x", "fc:", "  fc: linear x fc.w _ -> y {} work=x2"},
			`step/micro/fc: its workspace x2 overlaps its operand x`},
		{"name twice", []string{"see:", "  x: copy tokens -> seen wait=1"}, `step/micro: operation 2 (copy) is named "x"`},
		{"unit", []string{"x:", "  x: fill -> x {Value=1} unit=%5"}, `step/micro/x: belongs to unit 5, want one of the program's 1 or -1`},

		// Tables.
		{"view outside", []string{"buffer own", "buffer own f32 [256] device parameters run view=value/fc stride=1024 offset=4"},
			`buffer own: bytes 3076 to 4100 on the last of 4 ranks, want inside the 4096 bytes of value/fc`},
		{"view unaligned", []string{"buffer fc.w", "buffer fc.w f32 [64,10] device parameters run view=value/fc offset=2"}, `buffer fc.w: starts at byte 2`},
		{"view of another type", []string{"buffer own", "buffer own i32 [256] device parameters run view=value/fc stride=1024"}, `buffer own: is i32, its base value/fc f32`},
		{"view of another space", []string{"buffer own", "buffer own f32 [256] host parameters run view=value/fc stride=1024"}, `buffer own: is in host, its base value/fc in device`},
		{"view of a view of itself", []string{"buffer own", "buffer own f32 [640] device parameters run view=fc.w", "buffer fc.w", "buffer fc.w f32 [640] device parameters run view=own"}, `its views form a circle`},
		{"view along no axis", []string{"buffer own", "buffer own f32 [256] device parameters run view=value/fc stride=1024 axis=1"}, `buffer own: its rank stride is along mesh axis 1, want 0 to 0`},
		{"size", []string{"buffer x", "buffer x f32 [4000000000,4000000000] device activations phase"}, `buffer x: shape [4000000000 4000000000] of f32 has more bytes than an int64 counts`},
		{"empty dimension", []string{"buffer x", "buffer x f32 [16,0] device activations phase"}, `buffer x: shape [16 0] has a dimension below 1`},
		{"dtype", []string{"buffer x", "buffer x dtype(77) [16,64] device activations phase"}, `buffer x: dtype(77) is not a dtype`},
		{"padding", []string{"buffer x", "buffer x f32 [16,64] device activations phase pad=5000"}, `buffer x: 5000 bytes of padding, want 0 to its 4096 bytes`},
		{"role's type", []string{"role loss", "role loss x"}, `loss (x) is f32, want f64`},
		{"role's index", []string{"role loss", "role loss %99"}, `loss is buffer 99, want one of the program's 13 or none`},
		{"parameter's value", []string{"param", "param fc.w [64,11] normal unit=fc value=fc.w"}, `parameter fc.w: its value fc.w has shape [64 10], want the 704 elements of [64 11]`},
		{"segment outside", []string{"segment", "  segment fc.w len=641"}, `unit 0 (fc): segment 0 has elements 0 to 641 of fc.w`},
		{"segment start", []string{"segment", "  segment fc.w len=640 flat=8"}, `unit 0 (fc): segment 0 of fc.w starts at element 0 of it and 8 of the unit, want multiples of 256`},
		{"flat length", []string{"unit", "unit fc flat=512"}, `unit 0 (fc): flat length 512, want at least the 640 elements of its segments`},
		{"state's length", []string{"value", "  value value/fc name=value axis=-1 len=256"}, `unit 0 (fc): state value (value/fc) has 1024 elements, want the 256 that a rank holds`},
		{"mesh", []string{"mesh", "mesh data=0"}, `mesh axis 0 (data) has size 0, want at least 1`},
		{"section twice", []string{"section init", "section step"}, `section 1 is named "step"; a section needs a name of its own`},
		{"repetition", []string{"phase micro", "phase micro ×-1"}, `step/micro: runs -1 times, want 0 or more`},
	} {
		t.Run(c.name, func(t *testing.T) {
			p, err := progtext.Parse(edit(t, c.edits...))
			require.NoError(t, err)
			err = graph.Verify(p)
			if c.err == "" {
				require.NoError(t, err)
				return
			}
			require.ErrorContains(t, err, c.err)
		})
	}
}
