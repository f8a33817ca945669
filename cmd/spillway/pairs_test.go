package main

import (
	"bytes"
	"fmt"
	"maps"
	"math/rand/v2"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/spf13/pflag"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/spillway-ml/spillway/cmd/spillway/internal/options"
	"github.com/spillway-ml/spillway/internal/testkit/long"
)

// A choice is a value of one of train's flags other than the default, with the flags that it needs.
// DIR is a folder of the run.
type choice struct {
	flag, value string
	needs       []string // as "flag=value"; "flag=" takes a flag of the base away
	neutral     bool     // the run's parameters have the same bits without it
}

// pairBase is the run that choices are added to: with four ranks, two micro-batches for each
// suffice for two stages, two tensor ranks or two replicas.
var pairBase = []string{"model=" + testdata + "/gpt2", "data=" + testdata + "/text.bin", "steps=2", "batch=1", "seq=16", "accum=2", "ranks=4"}

// talk trains on conversations, whose ends need a token beyond bytes.
var (
	talk      = []string{"data=DIR/talk.jsonl", "tokenizer=bytes", "model=DIR/model"}
	templated = append(slices.Clone(talk), "template=DIR/template.jinja")
)

// choices has one or more values of each flag that a run on CPU ranks in one process may have.
var choices = []choice{
	{flag: "model", value: testdata + "/llama-tied"},
	{flag: "init", value: testdata + "/gpt2"},
	{flag: "data", value: "DIR/text.txt", needs: []string{"tokenizer=bytes"}},
	{flag: "tokenizer", value: "bytes", needs: []string{"data=DIR/text.txt"}},
	{flag: "text-field", value: "t", needs: []string{"data=DIR/text.jsonl", "tokenizer=bytes"}},
	{flag: "data-glob", value: "*.txt", needs: []string{"data=DIR/texts", "tokenizer=bytes"}},
	{flag: "template", value: "DIR/template.jinja", needs: talk},
	{flag: "loss-on", value: "all", needs: templated},
	{flag: "long", value: "drop", needs: templated},
	{flag: "packing", value: "off", needs: templated},
	{flag: "packing", value: "on", needs: templated},
	{flag: "order", value: "shuffled"},
	{flag: "eval-data", value: testdata + "/text.bin", neutral: true},
	{flag: "eval-split", value: "40%", needs: []string{"data=DIR/texts", "tokenizer=bytes"}},
	{flag: "eval-every", value: "1", needs: []string{"eval-data=" + testdata + "/text.bin"}, neutral: true},
	{flag: "eval-steps", value: "2", needs: []string{"eval-data=" + testdata + "/text.bin"}, neutral: true},
	{flag: "steps", value: "3"},
	{flag: "epochs", value: "1", needs: []string{"steps=", "seq=32"}},
	{flag: "batch", value: "2"},
	{flag: "seq", value: "8"},
	{flag: "accum", value: "3"},
	{flag: "ranks", value: "8"},
	{flag: "global-batch", value: "16", needs: []string{"accum="}},
	{flag: "batch-schedule", value: "0:8,1:16", needs: []string{"accum="}},
	{flag: "rank-shares", value: "1,2,2,3", needs: []string{"accum=", "global-batch=8", "reproducible=true", "ranks=4"}},
	{flag: "accum-order", value: "layer"},
	{flag: "optimizer", value: "adagrad"},
	{flag: "optimizer", value: "lamb"},
	{flag: "optimizer", value: "larc"},
	{flag: "optimizer", value: "lars"},
	{flag: "optimizer", value: "muon"},
	{flag: "optimizer", value: "novograd"},
	{flag: "optimizer", value: "sgd"},
	{flag: "lr", value: "0.01"},
	{flag: "lr-schedule", value: "cosine"},
	{flag: "warmup", value: "1"},
	{flag: "min-lr", value: "0.0001", needs: []string{"lr-schedule=linear"}},
	{flag: "lr-scale", value: "sqrt"},
	{flag: "lr-base-batch", value: "4", needs: []string{"lr-scale=linear"}},
	{flag: "weight-decay", value: "0"},
	{flag: "beta1", value: "0.8"},
	{flag: "nesterov", value: "true", needs: []string{"optimizer=sgd"}},
	{flag: "beta2", value: "0.9"},
	{flag: "eps", value: "1e-6"},
	{flag: "clip", value: "0.5"},
	{flag: "dropout", value: "0.1"},
	{flag: "freeze", value: "*.0.*"},
	{flag: "lora", value: "r=2"},
	{flag: "lora", value: "r=2,dropout=0.1"},
	{flag: "seed", value: "2"},
	{flag: "on-nonfinite", value: "skip", neutral: true},
	{flag: "trust", value: "0.01", needs: []string{"optimizer=lars"}},
	{flag: "adapt-all", value: "true", needs: []string{"optimizer=lamb"}},
	{flag: "device-memory", value: "64MiB", neutral: true},
	{flag: "host-memory", value: "256MiB", neutral: true},
	{flag: "disk", value: "DIR/disk", neutral: true},
	{flag: "zero", value: "0"},
	{flag: "zero", value: "1"},
	{flag: "zero", value: "2"},
	{flag: "recompute", value: "selective", neutral: true},
	{flag: "recompute", value: "full", neutral: true},
	{flag: "recompute", value: "drop:h.1.attn", needs: []string{"model=" + testdata + "/gpt2"}, neutral: true},
	{flag: "offload", value: "optimizer=host", neutral: true},
	{flag: "offload", value: "optimizer=disk", needs: []string{"disk=DIR/disk"}, neutral: true},
	{flag: "offload", value: "parameters=host,gradients=host", neutral: true},
	{flag: "offload", value: "parameters=disk", needs: []string{"disk=DIR/disk"}, neutral: true},
	{flag: "offload", value: "gradients=disk", needs: []string{"disk=DIR/disk"}, neutral: true},
	{flag: "offload", value: "activations=host", neutral: true},
	{flag: "offload", value: "activations=disk", needs: []string{"disk=DIR/disk"}, neutral: true},
	{flag: "offload", value: "optimizer=host:25%+disk", needs: []string{"disk=DIR/disk"}, neutral: true},
	{flag: "prefetch", value: "2", neutral: true},
	{flag: "overlap", value: "off", neutral: true},
	{flag: "disk-cache", value: "64KiB", needs: []string{"disk=DIR/disk", "offload=optimizer=disk"}, neutral: true},
	{flag: "frozen-cache", value: "host:16MiB", needs: []string{"freeze=wte.*,wpe.*,h.0.*", "steps=4", "model=" + testdata + "/gpt2"}},
	{flag: "fit", value: "true"},
	{flag: "allow", value: "bf16", needs: []string{"fit=true"}},
	{flag: "precision", value: "bf16"},
	{flag: "precision", value: "fp16"},
	{flag: "bf16-rounding", value: "portable", needs: []string{"precision=bf16"}},
	{flag: "base", value: "bf16", needs: []string{"lora=r=2"}},
	{flag: "base", value: "int8", needs: []string{"lora=r=2"}},
	{flag: "reduce", value: "fp32", needs: []string{"precision=bf16"}},
	{flag: "int8", value: "optimizer"},
	{flag: "int8", value: "gather", needs: []string{"precision=bf16"}},
	{flag: "int8", value: "reduce"},
	{flag: "int8", value: "activations"},
	{flag: "int8", value: "matmul", needs: []string{"precision=bf16"}},
	{flag: "loss-scale", value: "1024", needs: []string{"precision=fp16"}},
	{flag: "loss-scale-hysteresis", value: "2", needs: []string{"precision=fp16"}},
	{flag: "stochastic-rounding", value: "true", needs: []string{"precision=bf16", "optimizer-dtype=bf16"}},
	{flag: "optimizer-dtype", value: "bf16", needs: []string{"precision=bf16", "stochastic-rounding=true"}},
	{flag: "reproducible", value: "true"},
	{flag: "threads", value: "1", neutral: true},
	{flag: "shard-size", value: "2"},
	{flag: "tensor", value: "2"},
	{flag: "tensor-slices", value: "2"},
	{flag: "pipeline", value: "2"},
	{flag: "pipeline-schedule", value: "gpipe", needs: []string{"pipeline=2"}},
	{flag: "stages", value: "0-0,1-1", needs: []string{"pipeline=2"}},
	{flag: "collectives", value: "tree", neutral: true},
	{flag: "collectives", value: "ring"},
	{flag: "transport", value: "inproc", neutral: true},
	{flag: "timeout", value: "2m", neutral: true},
	{flag: "checkpoint", value: "DIR/ck", neutral: true},
	{flag: "resume", value: "true", needs: []string{"checkpoint=DIR/ck"}, neutral: true},
	{flag: "accept-changes", value: "true", needs: []string{"checkpoint=DIR/ck", "resume=true"}, neutral: true},
	{flag: "save-every", value: "1", needs: []string{"checkpoint=DIR/ck"}, neutral: true},
	{flag: "async-save", value: "off", needs: []string{"checkpoint=DIR/ck"}, neutral: true},
	{flag: "keep", value: "1", needs: []string{"checkpoint=DIR/ck"}, neutral: true},
	{flag: "export", value: "DIR/hf", needs: []string{"checkpoint=DIR/ck"}, neutral: true},
	{flag: "metrics", value: "DIR/m.jsonl", neutral: true},
	{flag: "receipt", value: "DIR/r.jsonl", needs: []string{"checkpoint=DIR/ck"}, neutral: true},
	{flag: "receipt-every", value: "1", needs: []string{"checkpoint=DIR/ck", "receipt=DIR/r.jsonl"}, neutral: true},
	{flag: "trace", value: "DIR/t.json", neutral: true},
	{flag: "tensorboard", value: "DIR/tb", neutral: true},
	{flag: "metrics-addr", value: "127.0.0.1:0", neutral: true},
	{flag: "config", value: "DIR/c.yaml", neutral: true},
}

// elsewhere has the flags that do not apply to CPU ranks in one process.
var elsewhere = []string{"cuda-graphs", "device", "epilogues", "min-ranks", "ranks-per-process", "require-pinned"}

// chosen returns the flags of a base run with some choices; false: two of them set a flag to
// different values, so they are no pair.
func chosen(list ...choice) (map[string]string, bool) {
	args := map[string]string{}
	for _, c := range list {
		for _, text := range append(slices.Clone(c.needs), c.flag+"="+c.value) {
			name, value, _ := strings.Cut(text, "=")
			if was, given := args[name]; given && was != value {
				return nil, false
			}
			args[name] = value
		}
	}
	for _, text := range pairBase {
		name, value, _ := strings.Cut(text, "=")
		if _, given := args[name]; !given {
			args[name] = value
		}
	}
	return args, true
}

// trainPair trains with the flags in a new folder.
func trainPair(t *testing.T, args map[string]string) result {
	dir := t.TempDir()
	defer os.RemoveAll(dir) // otherwise thousands of folders would remain until the test ends
	write := func(name, text string) {
		require.NoError(t, os.MkdirAll(filepath.Dir(filepath.Join(dir, name)), 0o755))
		require.NoError(t, os.WriteFile(filepath.Join(dir, name), []byte(text), 0o644))
	}
	prose, err := os.ReadFile(testdata + "/text.txt")
	require.NoError(t, err)
	write("text.txt", string(prose))
	config, err := os.ReadFile(testdata + "/gpt2/config.json")
	require.NoError(t, err)
	write("model/config.json", strings.Replace(string(config), `"vocab_size": 256`, `"vocab_size": 260`, 1))
	write("c.yaml", "eval-steps: 3\n")
	write("template.jinja", "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}")
	var fields, talks strings.Builder
	for i := range 30 {
		part := string(prose[i*100 : i*100+90])
		write(fmt.Sprintf("texts/%d.txt", i), part)
		fmt.Fprintf(&fields, "{\"t\": %q}\n", part)
		fmt.Fprintf(&talks, "{\"messages\": [{\"role\": \"user\", \"content\": %q}, {\"role\": \"assistant\", \"content\": %q}]}\n", part[:6], part[6:12])
	}
	write("text.jsonl", fields.String())
	write("talk.jsonl", talks.String())
	line := []string{"train"}
	for _, name := range slices.Sorted(maps.Keys(args)) {
		if value := args[name]; value != "" {
			line = append(line, "--"+name+"="+strings.ReplaceAll(value, "DIR", dir))
		}
	}
	return command(line...)
}

func (c choice) String() string { return "--" + c.flag + " " + filepath.Base(c.value) }

var refusalLine = regexp.MustCompile(`(?m)^spillway: .*$`)

// names reports whether a refusal names a flag.
func names(refusal, flag string) bool {
	return regexp.MustCompile(`--` + flag + `([^-\w]|$)`).MatchString(refusal)
}

// names reports whether a refusal names a choice: its flag, or one that it needs.
func (c choice) names(refusal string) bool {
	return names(refusal, c.flag) || slices.ContainsFunc(c.needs, func(text string) bool {
		name, _, _ := strings.Cut(text, "=")
		return names(refusal, name)
	})
}

// Every flag of train has a choice, and every choice alone trains.
func TestEveryFlagHasAChoice(t *testing.T) {
	options.TrainSet().VisitAll(func(f *pflag.Flag) {
		has := slices.ContainsFunc(choices, func(c choice) bool { return c.flag == f.Name })
		require.NotEqual(t, slices.Contains(elsewhere, f.Name), has, "--%s", f.Name)
	})
	for _, c := range long.Sample(11, 12, choices) {
		args, ok := chosen(c)
		require.True(t, ok)
		got := trainPair(t, args)
		assert.Zero(t, got.status, "%s: %s", c, got.stderr)
	}
}

// pairsPage is the table of refused pairs.
var pairsPage = filepath.Join("..", "..", "docs", "pairs.md")

// Every pair of train's flags trains, or is refused with status 1 and the names of both or of flags
// that they need. If one of a pair is neutral, the bits are the other's alone. A refusal because of
// both themselves is in docs/pairs.md. The default is a sample; SPILLWAY_LONG=all tests every pair.
func TestPairsOfFlags(t *testing.T) {
	var all [][2]choice
	for i, a := range choices {
		for _, b := range choices[i+1:] {
			if _, ok := chosen(a, b); ok && a.flag != b.flag {
				all = append(all, [2]choice{a, b})
			}
		}
	}
	n := long.Of(25, 300, len(all))
	if *update {
		n = len(all)
	}
	rng := rand.New(rand.NewPCG(34, 7))
	rng.Shuffle(len(all), func(i, j int) { all[i], all[j] = all[j], all[i] })
	page, err := os.ReadFile(pairsPage)
	require.NoError(t, err)
	alone := map[string]string{} // by choice: the parameters' SHA-256
	refused := map[string][]string{}
	for _, p := range all[:n] {
		args, _ := chosen(p[0], p[1])
		got := trainPair(t, args)
		what := fmt.Sprintf("%s with %s: %s", p[0], p[1], got.stderr)
		if got.status != 0 {
			refusal := refusalLine.FindString(got.stderr)
			if assert.Equal(t, 1, got.status, what) && assert.True(t, p[0].names(refusal) && p[1].names(refusal), what) &&
				names(refusal, p[0].flag) && names(refusal, p[1].flag) {
				refused[p[0].String()] = append(refused[p[0].String()], p[1].String())
				refused[p[1].String()] = append(refused[p[1].String()], p[0].String())
			}
			continue
		}
		for i, c := range p {
			// The choice of --fit, and so the bits, depend on the given flags.
			if other := p[1-i]; c.neutral && args["fit"] == "" {
				if alone[other.String()] == "" {
					args, _ := chosen(other)
					alone[other.String()] = shaOf(t, trainPair(t, args).stdout)
				}
				assert.Equal(t, alone[other.String()], shaOf(t, got.stdout), what)
			}
		}
	}
	if *update {
		require.NoError(t, os.WriteFile(pairsPage, pairsTable(refused), 0o644))
		return
	}
	for _, p := range all[:n] {
		a, b := p[0].String(), p[1].String()
		require.Equal(t, slices.Contains(refused[a], b), regexp.MustCompile("(?m)^\\| `"+regexp.QuoteMeta(a)+"` \\|.*`"+regexp.QuoteMeta(b)+"`").Match(page),
			"%s with %s: docs/pairs.md is not what is refused: rewrite it with -update", a, b)
	}
}

// pairsTable returns the page of refused pairs.
func pairsTable(refused map[string][]string) []byte {
	var page bytes.Buffer
	fmt.Fprint(&page, `# Pairs of flags

`+"`spillway train`"+` on CPU ranks in one process accepts every pair of its flags except those in this
table. It refuses these with status 1 and an error that names both. The table has a typical value of
each flag, or several if they differ. A flag may need another one, as
`+"`--trust`"+` needs `+"`--optimizer lars`"+`. The conflicts of the needed flag are listed only in its row.

`+"`go test ./cmd/spillway -run TestPairsOfFlags -update`"+` trains with each pair and rewrites this page.

| flag | cannot be combined with |
| --- | --- |
`)
	for _, c := range choices {
		if list := refused[c.String()]; len(list) > 0 {
			slices.Sort(list)
			fmt.Fprintf(&page, "| `%s` | `%s` |\n", c, strings.Join(slices.Compact(list), "`, `"))
		}
	}
	return page.Bytes()
}
