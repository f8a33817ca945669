package processes

import (
	"context"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/spf13/pflag"
	"github.com/stretchr/testify/require"

	"github.com/spillway-ml/spillway"
	"github.com/spillway-ml/spillway/cmd/spillway/internal/jobs"
	"github.com/spillway-ml/spillway/cmd/spillway/internal/options"
	"github.com/spillway-ml/spillway/cmd/spillway/internal/training"
	"github.com/spillway-ml/spillway/internal/testkit/long"
	"github.com/spillway-ml/spillway/launch"
)

// perRank runs a command as a rank: rank 1 gets further arguments, or another program. Each rank
// writes its status and its output to a folder.
const perRank = `r=$SPILLWAY_RANK$OMPI_COMM_WORLD_RANK$PMI_RANK; dir=$0; other=$1; program=$2; extra=$3; shift 3
[ $r = 1 ] || { extra=; other=; }
env $other "$program" "$@" $extra >$dir/$r.out 2>$dir/$r.said; status=$?; echo $status >$dir/$r.new; mv $dir/$r.new $dir/$r.status; exit $status`

// starters start two ranks of a shell script with arguments, and return the launcher's status. They
// use MPI, or set the environment variables of launch, as users may too.
var starters = map[string]func(t *testing.T, script ...string) int{
	"shm": func(t *testing.T, script ...string) int {
		end, err := launch.Run(context.Background(), launch.Options{Ranks: 2, Program: "/bin/sh", Args: append([]string{"-c"}, script...), Grace: time.Minute}, nil)
		require.NoError(t, err)
		return end.Status
	},
	"mpirun.openmpi": func(t *testing.T, script ...string) int {
		return mpirunProgram(t, "mpirun.openmpi", 2, append([]string{"/bin/sh", "-c"}, script...)...).end(t)
	},
	"mpirun.mpich": func(t *testing.T, script ...string) int {
		return mpirunProgram(t, "mpirun.mpich", 2, append([]string{"/bin/sh", "-c"}, script...)...).end(t)
	},
}

// copyOf returns a copy of a file or folder under another name.
func copyOf(t *testing.T, path string) string {
	t.Helper()
	to := filepath.Join(t.TempDir(), "copy"+filepath.Ext(path))
	require.NoError(t, exec.Command("cp", "-r", path, to).Run())
	return to
}

// Two ranks with different settings are rejected over every transport. Rank 0 names the rank, the
// flag and both values, and every rank ends with status 1.
func TestRanksAgree(t *testing.T) {
	t.Parallel()
	if testing.Short() {
		t.Skip("starts processes")
	}
	binary, err := built()
	require.NoError(t, err)
	dir := t.TempDir()
	other := copyOf(t, testdata+"/gpt2")
	weights := filepath.Join(other, "model.safetensors")
	text, err := os.ReadFile(weights)
	require.NoError(t, err)
	text[len(text)-1]++
	require.NoError(t, os.WriteFile(weights, text, 0o644))
	shape := edited(t, "gpt2", func(c map[string]any) { c["layer_norm_epsilon"] = 1e-3 })
	cases := map[string]string{ // rank 0's message, by rank 1's further arguments
		"--lr 0.5":                               "has --lr 0.5, rank 0 (host %s) 0.001",
		"--zero 0":                               "has --zero 0, rank 0 (host %s) 3",
		"--steps 3":                              "has --steps 3, rank 0 (host %s) 2",
		"--resume":                               "has --resume true, rank 0 (host %s) false",
		"--order shuffled":                       "has --order shuffled, rank 0 (host %s) sequential",
		"--global-batch 4":                       "has --accum 2, rank 0 (host %s) 1",
		"--checkpoint none":                      "has --checkpoint none, rank 0 (host %s) given",
		"--model " + shape:                       "has --model NormEps 0.001, rank 0 (host %s) 1e-05",
		"--init " + other:                        "has --init ",
		"--data " + testdata + "/text.txt":       "has --data 3097 bytes of SHA-256 ",
		"--zero 9":                               "--zero 9: stages are 0, 1, 2 and 3",
		"--config " + writeFile(t, "c", "lr: 2"): "has --lr 2, rank 0 (host %s) 0.001",
		"--nowhere":                              "unknown flag --nowhere",
		"--checkpoint " + dir + "/elsewhere":     "rank 1 (host %s) does not have it",
	}
	host, err := os.Hostname()
	require.NoError(t, err)
	all := slices.Sorted(maps.Keys(cases))
	for k, starter := range slices.Sorted(maps.Keys(starters)) {
		for i, extra := range all {
			if !long.On() && i%6 != 2*k { // each case runs with at most one starter
				continue
			}
			if starter == "shm" && extra == "--nowhere" {
				continue // with shm, launch reports a rank that ends before it joins
			}
			t.Run(starter+"/"+extra, func(t *testing.T) {
				t.Parallel()
				to := t.TempDir()
				line := tinyWith("--init", testdata+"/gpt2", "--checkpoint", filepath.Join(to, "ck"))
				status := starters[starter](t, append([]string{perRank, to, "", binary, extra}, line...)...)
				want := cases[extra]
				if strings.Contains(want, "%s") {
					want = fmt.Sprintf(want, host)
				}
				require.Contains(t, saidOf(to, 0), want)
				require.Contains(t, saidOf(to, 0), "rank 1 (host "+host+")")
				require.Equal(t, 1, status, "the launcher's")
				for rank := range 2 {
					if starter == "mpirun.openmpi" && statusOf(to, rank) == "" {
						continue // its launcher kills the other rank when the first has ended with status 1
					}
					require.Equal(t, "1", statusOf(to, rank), "rank %d: %s", rank, saidOf(to, rank))
				}
				require.NoDirExists(t, filepath.Join(to, "ck", "step-00000002"))
			})
		}
	}
}

// Ranks may differ in paths, memory caps, threads, observers and the kind of CPU: the run has the
// bits of one process.
func TestWhereRanksMayDiffer(t *testing.T) {
	t.Parallel()
	if testing.Short() {
		t.Skip("starts processes")
	}
	binary, err := built()
	require.NoError(t, err)
	offload := []string{"--offload", "optimizer=disk", "--disk"}
	one := filepath.Join(t.TempDir(), "one.jsonl")
	p := start(t, append(tinyWith(append(offload, t.TempDir())...), "--ranks", "2", "--init", testdata+"/gpt2", "--metrics", one)...)
	require.Zero(t, p.end(t), p.errs.String())
	for _, starter := range slices.Sorted(maps.Keys(starters)) {
		if !long.On() && starter == "mpirun.openmpi" {
			continue
		}
		t.Run(starter, func(t *testing.T) {
			t.Parallel()
			dir, disk := t.TempDir(), t.TempDir()
			many := filepath.Join(dir, "many.jsonl")
			require.NoError(t, os.Mkdir(filepath.Join(dir, "ck"), 0o755))
			require.NoError(t, os.Symlink(filepath.Join(dir, "ck"), filepath.Join(dir, "same")))
			extra := strings.Join([]string{"--model", copyOf(t, testdata+"/gpt2"), "--data", copyOf(t, testdata+"/text.bin"), "--init", copyOf(t, testdata+"/gpt2"),
				"--checkpoint", filepath.Join(dir, "same"), "--disk", disk + ":900MiB", "--threads", "3", "--device-memory", "2GiB", "--metrics", filepath.Join(dir, "unused"),
				"--metrics-addr", "127.0.0.1:0", "--config", writeFile(t, "c", "batch: 1")}, " ")
			line := append(tinyWith(append(offload, t.TempDir())...), "--init", testdata+"/gpt2", "--metrics", many, "--checkpoint", filepath.Join(dir, "ck"), "--device-memory", "3GiB")
			status := starters[starter](t, append([]string{perRank, dir, "SPILLWAY_SIMD=portable", binary, extra}, line...)...)
			require.Zero(t, status, saidOf(dir, 0)+saidOf(dir, 1))
			got, want := outcomeOf(t, many), outcomeOf(t, one)
			require.Equal(t, want.losses, got.losses)
			require.Equal(t, want.sha, got.sha)
			require.NoFileExists(t, filepath.Join(dir, "unused"), "rank 0 speaks for all")
			require.Contains(t, saidOf(dir, 0), "of its cap of 2.00 GiB", "the smallest cap counts")
		})
	}
}

// TestEveryFlagIsCompared checks that each flag of train is part of the terms that ranks compare,
// unless a list allows it to differ. Another value must give other terms.
func TestEveryFlagIsCompared(t *testing.T) {
	t.Parallel()
	terms := func(flags ...string) (map[string]string, error) {
		var c spillway.Config
		a := &jobs.Asked{Fs: pflag.NewFlagSet("train", pflag.ContinueOnError), C: &c, L: &options.Later{}}
		options.Train(a.Fs, &c, a.L)
		options.JobFlags(a.Fs, &c)
		if err := a.Fs.Parse(append([]string{"--model", testdata + "/gpt2", "--data", testdata + "/text.bin"}, flags...)); err != nil {
			return nil, err
		}
		var j spillway.Job
		err := a.Of(context.Background(), &j)
		return j.Terms, err
	}
	with := map[string]string{ // flags required by other flags
		"nesterov": "--optimizer=sgd", "trust": "--optimizer=lars", "adapt-all": "--optimizer=lamb",
		"rank-shares":  "--reproducible --ranks=2 --accum=2",
		"frozen-cache": "--freeze=wte.*", "base": "--lora=r=2,alpha=2,targets=*", "lr-base-batch": "--lr-scale=linear", "accept-changes": "--resume --checkpoint=ck",
		"resume": "--checkpoint=ck", "keep": "--checkpoint=ck", "save-every": "--checkpoint=ck", "disk-cache": "--disk=d --offload=optimizer=disk",
		"eval-every": "--eval-data=" + testdata + "/text.bin", "loss-scale": "--precision=fp16", "loss-scale-hysteresis": "--precision=fp16",
		"min-lr": "--lr-schedule=cosine --lr=9", "reduce": "--precision=bf16", "optimizer-dtype": "--stochastic-rounding --precision=bf16",
		"stochastic-rounding": "--precision=bf16 --optimizer-dtype=bf16", "bf16-rounding": "--precision=bf16", "receipt-every": "--receipt=r",
		"pipeline": "--ranks=14 --zero=1", "pipeline-schedule": "--ranks=2 --pipeline=2 --zero=1", "stages": "--ranks=2 --pipeline=2 --zero=1",
	}
	values := []string{"portable", "7", "2", "true", "cuda", "fp32", "spillway-demo", "0.5", "gpipe", "0-0,1-1", "7s", "7%", "2,1", "0:4,2:8", "all", "drop", "bf16", "7MiB", "host:7MiB", "none", "full", "lamb", "linear", "shuffled", "layer", "optimizer", "optimizer=host", "skip", "tree", "on", "off", "shm", "r=4,alpha=2,targets=*", "elsewhere",
		testdata + "/text.txt", testdata + "/gpt2"}
	for _, name := range []string{"template", "tokenizer", "data"} { // compared by content, not by path
		one, err := terms("--" + name + "=" + testdata + "/text.txt")
		require.NoError(t, err)
		same, err := terms("--" + name + "=" + copyOf(t, testdata+"/text.txt"))
		require.NoError(t, err)
		require.Equal(t, one, same, name)
	}
	flags := pflag.NewFlagSet("train", pflag.ContinueOnError)
	options.Train(flags, &spillway.Config{}, &options.Later{})
	options.JobFlags(flags, &spillway.Config{})
	training.Command().Flags().VisitAll(func(f *pflag.Flag) { require.NotNil(t, flags.Lookup(f.Name), "--%s is bound elsewhere", f.Name) })
	flags.VisitAll(func(f *pflag.Flag) {
		beside := strings.Fields(with[f.Name])
		same, err := terms(beside...)
		if err != nil { // the flag and its required flags are invalid without each other
			same = nil
		}
		differs, tried := false, 0
		for _, v := range values {
			if other, err := terms(append(beside[:len(beside):len(beside)], "--"+f.Name+"="+v)...); err == nil {
				tried++
				_, named := other["--"+f.Name]
				differs = differs || same == nil && named || same != nil && !maps.Equal(same, other)
			}
		}
		require.Positive(t, tried, "--%s takes none of the values", f.Name)
		require.Equal(t, !slices.Contains(jobs.OwnFlags, f.Name), differs, "--%s", f.Name)
	})
}
