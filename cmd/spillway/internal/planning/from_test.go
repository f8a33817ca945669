package planning_test

import (
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/spillway-ml/spillway/calibration"
	"github.com/spillway-ml/spillway/cmd/spillway/internal/cli"
	"github.com/spillway-ml/spillway/cmd/spillway/internal/planning"
	"github.com/spillway-ml/spillway/internal/testkit/ownworld"
	"github.com/spillway-ml/spillway/memplan/cost"
)

// readBack plans a request into a file and repeats the plan from it; the documents are equal.
func readBack(t *testing.T, between func(), args ...string) planning.Doc {
	t.Helper()
	file := filepath.Join(t.TempDir(), "plan.json")
	first := command(append([]string{"plan", "--json", file}, args...)...)
	want, err := os.ReadFile(file)
	require.NoError(t, err, first.stderr)
	between()
	again := command("plan", "--from", file, "--json", "-")
	require.Equal(t, first.status, again.status, "%v: %s", args, again.stderr)
	require.Equal(t, string(want), again.stdout, args)
	var doc planning.Doc
	require.NoError(t, json.Unmarshal(want, &doc))
	return doc
}

// A plan repeated from its document has the same bytes.
func TestAPlanReadsBack(t *testing.T) {
	tiny := "--model " + testdata + "/gpt2 --batch 1 --seq 16 --effort 20 "
	config := writeFile(t, "c.yaml", "ranks: 4\nfreeze: [wpe.*, h.0.*]\nreproducible: true\nglobal-batch: 8\n")
	for _, line := range []string{
		tiny,
		tiny + "--config " + config,
		tiny + "--ranks 2 --reproducible --global-batch 3 --rank-shares 2,1",
		tiny + "--ranks 2 --fit --global-batch 16 --tokens 1e6",
		tiny + "--ranks 4 --zero 0 --device-memory 400KiB --transport shm --overlap=off",
		tiny + "--device-memory 10KB",
		tiny + "--lora r=2,alpha=4,targets=h.*.attn.*,dropout=0.1 --optimizer-dtype fp32 --offload optimizer=host:50%",
		"--model gpt2 --gpu h100-80 --nodes 2 --gpus-per-node 2 --precision bf16 --node-memory 1TB --tokens 1e9 --price 2.5 --disk d:1GiB --effort 20",
		"--model gpt2 --gpu h100-80 --nodes 1 --gpus-per-node 2 --precision bf16 --stack megatron --effort 5",
	} {
		doc := readBack(t, func() {}, strings.Fields(line)...)
		require.Equal(t, planning.Version, doc.Version)
		require.Equal(t, "plan", doc.Command[0])
		require.NotContains(t, strings.Join(doc.Command, " "), "--json")
		require.LessOrEqual(t, doc.TokensPerSecond.Low, doc.TokensPerSecond.Predicted)
		require.Positive(t, doc.ProcessBytes)
		require.Equal(t, doc.Recommended == nil && !doc.Requested.Fits && len(doc.Ways)+len(doc.Changing) == 0, doc.Run == "", line)
	}
}

// A document has the data that its plan read from the machine: it reads back without the model's
// folder and the machine's measurements.
func TestAPlanReadsBackElsewhere(t *testing.T) {
	ownworld.Config(t, t.TempDir())
	slow := cost.Rates{Alone: cost.Rate{PerFlop: 1e-9}, Core: cost.Rate{PerFlop: 2e-9}}
	_, err := calibration.Keep(&cost.Calibration{Threads: 2, Rates: map[cost.Class]cost.Rates{"linear": slow}})
	require.NoError(t, err)
	_, err = calibration.KeepLinks(&cost.Links{Transport: "shm", Ranks: 2, Rates: map[cost.Class]cost.Rate{"all_gather": {PerByte: 1e-7}}})
	require.NoError(t, err)
	model := edited(t, "gpt2", func(map[string]any) {})
	doc := readBack(t, func() {
		require.NoError(t, os.RemoveAll(model))
		ownworld.Config(t, t.TempDir())
	}, "--model", model, "--threads", "2", "--ranks", "2", "--transport", "shm", "--effort", "20")
	require.NotNil(t, doc.Machine.CPU.Calibration)
	require.Len(t, doc.Machine.CPU.Links, 1)
	require.Contains(t, string(doc.Machine.Model), `"n_layer"`)
	require.Contains(t, doc.Machine.CPU.Rates, "as calibrated on ")
}

// A flag overrides the document's.
func TestFromWithOtherFlags(t *testing.T) {
	file := filepath.Join(t.TempDir(), "plan.json")
	shape := []string{"--model", testdata + "/gpt2", "--batch", "1", "--seq", "16", "--ranks", "2"}
	require.Equal(t, cli.ExitDone, command(append([]string{"plan", "--effort", "1", "--json", file}, shape...)...).status)
	_, want := planned(t, append(shape, "--batch", "2", "--reproducible")...)
	_, got := planned(t, "--from", file, "--batch", "2", "--reproducible")
	require.Equal(t, want, got)
	_, want = planned(t, "--model", testdata+"/llama-tied", "--batch", "1", "--seq", "16", "--ranks", "2")
	_, got = planned(t, "--from", file, "--model", testdata+"/llama-tied")
	require.Equal(t, want, got)
}

func TestFromRefuses(t *testing.T) {
	good := filepath.Join(t.TempDir(), "plan.json")
	require.Equal(t, cli.ExitDone, command("plan", "--model", "spillway-demo", "--effort", "1", "--json", good).status)
	text, err := os.ReadFile(good)
	require.NoError(t, err)
	with := func(change func(map[string]any)) string {
		var doc map[string]any
		require.NoError(t, json.Unmarshal(text, &doc))
		change(doc)
		out, err := json.Marshal(doc)
		require.NoError(t, err)
		return writeFile(t, "p.json", string(out))
	}
	set := func(key string, value any) string { return with(func(doc map[string]any) { doc[key] = value }) }
	const remedy = "give a file that spillway plan --json has written"
	for _, c := range []struct {
		args []string
		want string
	}{
		{[]string{"--from", "no-such.json"}, "no-such.json"},
		{[]string{"--from", writeFile(t, "a.json", "{")}, "not a plan's JSON"},
		{[]string{"--from", writeFile(t, "a.json", "[1]")}, remedy},
		{[]string{"--from", writeFile(t, "a.json", "{}")}, "it has no version"},
		{[]string{"--from", set("version", 2)}, "version 2 is not known, only 1; read it with the spillway that wrote it"},
		{[]string{"--from", set("version", "one")}, "not a plan's JSON"},
		{[]string{"--from", set("command", []string{"train"})}, "its command or machine is missing"},
		{[]string{"--from", with(func(doc map[string]any) { delete(doc, "machine") })}, "its command or machine is missing"},
		{[]string{"--from", set("command", []string{"plan", "--nope", "1"})}, `"--nope" is no flag of a plan's command`},
		{[]string{"--from", set("command", []string{"plan", "--json", "x"})}, `"--json" is no flag of a plan's command`},
		{[]string{"--from", set("command", []string{"plan", "model"})}, `"model" is no flag of a plan's command`},
		{[]string{"--from", set("command", []string{"plan", "--model"})}, `"--model" has no value`},
		{[]string{"--from", set("command", []string{"plan", "--zero", "x"})}, `--zero "x": a plain decimal number is needed`},
		{[]string{"--from", set("command", []string{"plan", "--model", "gpt9"})}, "gpt9"},
		{[]string{"--from", set("machine", map[string]any{"model_config": map[string]any{"model_type": "gpt9"}})}, "model_config"},
		{[]string{"--from", good, "--config", writeFile(t, "c.yaml", "ranks: 2\n")}, "--from " + good[:10]},
		{[]string{"--from", good, "--calibrate"}, "with --calibrate"},
		{[]string{"--from", good, "--json", good}, "which --from reads"},
	} {
		r := command(append([]string{"plan"}, c.args...)...)
		require.Equal(t, cli.ExitBadInput, r.status, "%v: %s", c.args, r.stderr)
		require.Contains(t, r.stderr, c.want, c.args)
		require.Equal(t, 1, strings.Count(r.stderr, "\n"), r.stderr)
		require.Empty(t, r.stdout)
	}
	now, err := os.ReadFile(good)
	require.NoError(t, err)
	require.Equal(t, string(text), string(now))
}
