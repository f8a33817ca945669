package train

import (
	"encoding/json"
	"fmt"
	"os"
	"strconv"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/spillway-ml/spillway/config"
	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/internal/testkit/long"
	"github.com/spillway-ml/spillway/memplan/cost"
	"github.com/spillway-ml/spillway/plan"
	"github.com/spillway-ml/spillway/planner"
)

// rewriteVariable names a variable that, when set, makes the test rewrite testdata/record.json.
const rewriteVariable = "SPILLWAY_REWRITE_RECORD"

const recordFile = "../testdata/record.json"

// recorded holds the results of one configuration: bits, bytes and predicted time.
type recorded struct {
	Name   string                `json:"name"`
	SHA256 string                `json:"params_sha256,omitempty"` // after two steps; "" if the CPU does not run it
	Comm   int64                 `json:"comm_bytes_per_step"`
	Time   string                `json:"step_seconds"` // on planner.CPUHardware(2), to 5 digits
	Spaces map[string]spaceBytes `json:"spaces"`
}

type spaceBytes struct {
	Peak    int64            `json:"peak_bytes"`
	At      string           `json:"peak_at"`
	Bound   int64            `json:"lower_bound"`
	ByClass map[string]int64 `json:"by_class"`
	Classes map[string]int64 `json:"class_peak_bytes"`
}

// recordedConfig is a configuration of the record; its name lists its settings.
type recordedConfig struct {
	name string
	request
	runs bool
}

// recordedConfigs returns the configurations of the record: every stage with every feature that
// rewrites the program.
func recordedConfigs() (list []recordedConfig) {
	add := func(model, name string, runs bool, set func(*request)) {
		for zero := range 4 {
			c := tiny(model)
			c.Steps, c.Clip, c.Ranks, c.Zero = 2, 0.5, 3, zero
			set(&c)
			list = append(list, recordedConfig{fmt.Sprintf("%s, stage %d, %d ranks, %s", model, zero, c.Ranks, name), c, runs})
		}
	}
	everything := func(tier string) string {
		return fmt.Sprintf("optimizer=%[1]s,parameters=%[1]s,gradients=%[1]s,activations=%[1]s", tier)
	}
	for _, ranks := range []int{1, 2, 3, 5} {
		add("gpt2", "plain", true, func(c *request) { c.Ranks = ranks })
	}
	add("llama-untied", "dropped and parked", true, func(c *request) { c.Recompute, c.Offload = "full", everything("host") })
	add("gpt2", "accumulated", true, func(c *request) { c.Accum, c.Batch = 3, 1 })
	add("gpt2", "accumulated, reproducible", true, func(c *request) { c.Accum, c.Batch, c.Reproducible = 3, 1, true })
	add("gpt2", "selective", true, func(c *request) { c.Recompute = "selective" })
	add("gpt2", "full", true, func(c *request) { c.Recompute = "full" })
	add("gpt2", "drops by name", true, func(c *request) { c.Recompute = "drop:h.*.mlp.act,h.*.ln_1" })
	add("gpt2", "optimizer on the host", true, func(c *request) { c.Offload = "optimizer=host" })
	add("gpt2", "optimizer on the host, not clipped", true, func(c *request) { c.Offload, c.Clip = "optimizer=host", 0 })
	add("gpt2", "everything on the host, accumulated", true, func(c *request) { c.Offload, c.Accum, c.Batch = everything("host"), 3, 1 })
	add("gpt2", "everything on disk", true, func(c *request) { c.Offload = everything("disk") })
	add("gpt2", "shares", true, func(c *request) {
		c.Offload = "optimizer=host:40%+disk:30%,parameters=host:60%,activations=host:h.*.mlp.act"
	})
	add("gpt2", "nothing ahead", true, func(c *request) { c.Offload, c.Prefetch = everything("host"), 0 })
	add("gpt2", "two ahead", true, func(c *request) { c.Prefetch = 2 })
	add("gpt2", "a frozen block", true, func(c *request) { c.Freeze = []string{"h.0.*"} })
	add("gpt2", "frozen norms", true, func(c *request) { c.Freeze = []string{"h.*.ln_*"} })
	add("gpt2", "a frozen beginning, cached", true, func(c *request) {
		c.Freeze, c.Offload, c.FrozenCache = []string{"wte.*", "wpe.*", "h.0.*"}, "optimizer=host", config.FrozenCache{Tier: graph.Host, Bytes: 1 << 20}
		c.Batch, c.Ranks = 1, 2
	})
	for _, o := range []string{"sgd", "lamb", "lars", "larc", "novograd"} {
		add("gpt2", o, true, func(c *request) { c.Optimizer, c.Ranks, c.LR = o, 2, 1e-3 })
	}
	add("gpt2", "lamb on the host", true, func(c *request) { c.Optimizer, c.Offload = "lamb", "optimizer=host" })
	add("gpt2", "novograd on the host", true, func(c *request) { c.Optimizer, c.Offload = "novograd", "optimizer=host" })
	add("gpt2", "two replicas", true, func(c *request) { c.Ranks, c.ShardSize, c.Batch = 4, 2, 1 })
	add("gpt2", "two replicas, accumulated", true, func(c *request) { c.Ranks, c.ShardSize, c.Batch, c.Accum = 6, 3, 1, 2 })
	for _, precision := range []string{"bf16", "fp16"} {
		add("gpt2", precision, false, func(c *request) { c.Precision = precision })
	}
	add("gpt2", "bf16, accumulated", false, func(c *request) { c.Precision, c.Accum, c.Batch = "bf16", 3, 1 })
	add("gpt2", "bf16, accumulated, reproducible", false, func(c *request) { c.Precision, c.Accum, c.Batch, c.Reproducible = "bf16", 3, 1, true })
	add("gpt2", "bf16, reduced in fp32", false, func(c *request) { c.Precision, c.Reduce = "bf16", "fp32" })
	add("gpt2", "bf16, everything on the host", false, func(c *request) { c.Precision, c.Offload = "bf16", everything("host") })
	add("gpt2", "fp16, everything on disk, full", false, func(c *request) { c.Precision, c.Offload, c.Recompute = "fp16", everything("disk"), "full" })
	add("gpt2", "bf16, two replicas", false, func(c *request) { c.Precision, c.Ranks, c.ShardSize = "bf16", 4, 2 })
	return list
}

// record plans a configuration and, if runs is set, trains two steps.
func record(t *testing.T, rc recordedConfig, runs bool) recorded {
	c := rc.request
	if c.Offload != "" {
		c.Disk = t.TempDir()
	}
	var built *plan.Plan
	var sha string
	if runs {
		sha = runPlanned(t, c, func(p *plan.Plan) { built = p }).sha
	} else {
		var err error
		built, err = c.planned().Plan(t.Context())
		require.NoError(t, err)
	}
	r := recorded{Name: rc.name, SHA256: sha, Comm: built.CommBytes, Spaces: map[string]spaceBytes{}}
	step, err := cost.Simulate(built.Program, "step", planner.CPUHardware(2).Machine(c.Ranks))
	require.NoError(t, err)
	r.Time = strconv.FormatFloat(step.Seconds, 'e', 4, 64)
	for s := range built.Layout.Spaces {
		use := &built.Layout.Spaces[s]
		if use.Peak == 0 {
			continue
		}
		b := spaceBytes{use.Peak, use.PeakAt, use.LowerBound, map[string]int64{}, map[string]int64{}}
		for class := range graph.NumClasses {
			if n := use.ByClass[class]; n > 0 {
				b.ByClass[class.String()] = n
			}
			if n := use.ClassPeak[class]; n > 0 {
				b.Classes[class.String()] = n
			}
		}
		r.Spaces[graph.Space(s).String()] = b
	}
	return r
}

// TestTheRecord compares each configuration with testdata/record.json: parameters after two steps,
// bytes per class and space, traffic and predicted time. An intended change must update the record.
// By default one stage of each configuration is trained, and all are planned.
func TestTheRecord(t *testing.T) {
	t.Parallel()
	rewrite := os.Getenv(rewriteVariable) != ""
	var want []recorded
	if !rewrite {
		text, err := os.ReadFile(recordFile)
		require.NoError(t, err)
		require.NoError(t, json.Unmarshal(text, &want))
	}
	list := recordedConfigs()
	if !rewrite {
		require.Len(t, want, len(list))
	}
	var got []recorded
	for i, c := range list {
		t.Run(c.name, func(t *testing.T) {
			runs := c.runs && (long.On() || rewrite || i%4 == i/4%4) // one of the 4 stages of each
			r := record(t, c, runs)
			if c.runs && !runs {
				r.SHA256 = want[i].SHA256
			}
			got = append(got, r)
			if !rewrite {
				require.Equal(t, want[i], r)
			}
		})
	}
	if !rewrite {
		return
	}
	lines := make([]string, len(got))
	for i, r := range got {
		line, err := json.Marshal(r)
		require.NoError(t, err)
		lines[i] = string(line)
	}
	text := "[\n" + strings.Join(lines, ",\n") + "\n]\n"
	require.NoError(t, os.WriteFile(recordFile, []byte(text), 0o644))
}
