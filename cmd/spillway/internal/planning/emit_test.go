package planning_test

import (
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/spillway-ml/spillway/cmd/spillway/internal/cli"
	"github.com/spillway-ml/spillway/cmd/spillway/internal/options"
	"github.com/spillway-ml/spillway/cmd/spillway/internal/planning"
)

// keptJobs are the requests whose jobs are in examples/cluster.
var keptJobs = map[string]string{
	"planned-slurm.sh":        "--emit slurm --model llama-3-8b --gpu h100-80 --nodes 2 --gpus-per-node 8 --precision bf16 --seq 4096 --batch 1 --tokens 1e9",
	"planned-jobset-gpu.yaml": "--emit jobset --model gpt2-xl --gpu rtx-4090 --nodes 1 --gpus-per-node 4 --precision bf16 --seq 1024 --disk /nvme:100GiB --offload optimizer=disk",
	"jobset.yaml":             "--emit jobset --model gpt2 --nodes 1 --gpus-per-node 8 --reproducible --batch 1 --global-batch 48 --threads 16 --steps 10000",
}

var plannedJobs sync.Map

// plannedJob returns plan's output for a job of keptJobs, and its document. It plans each once.
func plannedJob(t *testing.T, name string) (string, planning.Doc) {
	t.Helper()
	type planned struct {
		job string
		doc planning.Doc
	}
	once, _ := plannedJobs.LoadOrStore(name, sync.OnceValue(func() (p planned) {
		file := filepath.Join(t.TempDir(), "plan.json")
		r := command(append([]string{"plan", "--json", file}, strings.Fields(keptJobs[name])...)...)
		require.Equal(t, cli.ExitDone, r.status, r.stderr)
		text, err := os.ReadFile(file)
		require.NoError(t, err)
		require.NoError(t, json.Unmarshal(text, &p.doc))
		p.job = r.stdout
		return p
	}))
	p := once.(func() planned)()
	return p.job, p.doc
}

// The jobs in examples/cluster are plan's output. `-update` rewrites them.
func TestEmittedJobs(t *testing.T) {
	for name := range keptJobs {
		job, _ := plannedJob(t, name)
		path := filepath.Join("..", "..", "..", "..", "examples", "cluster", name)
		if *update {
			require.NoError(t, os.WriteFile(path, []byte(job), 0o644))
		}
		want, err := os.ReadFile(path)
		require.NoError(t, err)
		require.Equal(t, string(want), job, "%s is not what plan writes: rewrite it with -update", name)
	}
}

// A manifest for GPUs differs from that for CPUs only in comment, arguments, resources and the
// volume of a disk tier. examples/cluster/check validates the latter against the API.
func TestManifestsAreAlike(t *testing.T) {
	own := regexp.MustCompile(`(?m)^( *- ".*"| *(requests|limits): .*|#.*| *- \{name: scratch, .*| *- name: scratch\n.*scratch.*)\n`)
	read := func(name string) string {
		text, err := os.ReadFile(filepath.Join("..", "..", "..", "..", "examples", "cluster", name))
		require.NoError(t, err)
		return own.ReplaceAllString(string(text), "")
	}
	require.Equal(t, read("jobset.yaml"), read("planned-jobset-gpu.yaml"))
}

// sbatchOptions are options of sbatch(1), Slurm 24.05, in their long form.
var sbatchOptions = strings.Fields("account array begin chdir comment constraint cpus-per-gpu cpus-per-task dependency error exclusive export gpus gpus-per-node gpus-per-task gres " +
	"hint input job-name kill-on-invalid-dep licenses mail-type mail-user mem mem-per-cpu mem-per-gpu no-kill no-requeue nodelist nodes ntasks ntasks-per-gpu ntasks-per-node " +
	"open-mode output partition priority qos requeue reservation signal switches test-only time time-min tmp wait wckey")

// A Slurm script is valid bash, requests the plan's memory, and starts a valid train command.
func TestEmittedSlurm(t *testing.T) {
	bash, err := exec.LookPath("bash")
	if err != nil && runtime.GOOS != "linux" {
		t.Skip("no bash")
	}
	require.NoError(t, err)
	kept, _ := plannedJob(t, "planned-slurm.sh")
	jobs := []string{kept}
	for _, line := range []string{
		"--emit SLURM --effort 40 --model gpt2 --nodes 3 --gpus-per-node 4 --reproducible --batch 1 --global-batch 48",
		"--emit slurm --effort 40 --model " + testdata + "/gpt2 --nodes 1 --gpus-per-node 2 --seq 16 --checkpoint 'my runs' --save-every 5 --epochs 2 --offload activations=host:h.{0-0}.mlp.act --recompute none",
	} {
		args := append([]string{"plan"}, words(line)...)
		r := command(args...)
		require.Equal(t, cli.ExitDone, r.status, r.stderr)
		jobs = append(jobs, r.stdout)
	}
	for _, job := range jobs {
		check := exec.Command(bash, "-n")
		check.Stdin = strings.NewReader(job)
		said, err := check.CombinedOutput()
		require.NoError(t, err, "%s", said)
		for _, m := range regexp.MustCompile(`(?m)^#SBATCH --([a-z-]+)`).FindAllStringSubmatch(job, -1) {
			require.Contains(t, sbatchOptions, m[1])
		}
		_, srun, ok := strings.Cut(strings.ReplaceAll(job, " \\\n", ""), "\nsrun ")
		require.True(t, ok)
		srun, _, _ = strings.Cut(srun, "\n")
		_, train, ok := strings.Cut(srun, " spillway train ")
		require.True(t, ok, srun)
		fs := options.TrainSet()
		require.NoError(t, fs.Parse(words(train)), train)
		require.True(t, fs.Changed("resume") && fs.Changed("checkpoint") && fs.Changed("save-every"))
		require.False(t, fs.Changed("ranks"), "srun says how many")
		require.False(t, fs.Changed("fit"), "what fits is chosen already")
	}
}

// A job requests the memory of its processes by the plan plus the stated margin. Its steps are
// those of --tokens, and its time limit is above their time.
func TestEmittedMemoryAndTime(t *testing.T) {
	for name, ranks := range map[string]int64{"planned-slurm.sh": 8, "planned-jobset-gpu.yaml": 1, "jobset.yaml": 8} {
		job, doc := plannedJob(t, name)
		plan := ranks * doc.ProcessBytes
		mib, err := strconv.ParseInt(number(t, job, `(?:--mem=|limits: {memory: )(\d+)M`), 10, 64)
		require.NoError(t, err)
		require.GreaterOrEqual(t, mib<<20, plan+plan/8)
		require.LessOrEqual(t, mib<<20, plan+plan/8+65<<20)
		if name != "planned-slurm.sh" {
			continue
		}
		require.Equal(t, "8", number(t, job, `#SBATCH --gpus-per-node=(\d+)`))
		tokens := 1e9
		steps, err := strconv.ParseFloat(number(t, job, `--steps (\d+)`), 64)
		require.NoError(t, err)
		require.InDelta(t, tokens/float64(doc.Ranks*doc.Batch*doc.Accum*doc.Seq), steps, 1)
		var days, hours float64
		_, err = fmt.Sscanf(number(t, job, `#SBATCH --time=(\S+)`), "%f-%f:00:00", &days, &hours)
		require.NoError(t, err)
		require.Greater(t, days+hours/24, 1.2*doc.Budget.Days[1])
		require.Less(t, days+hours/24, 1.25*doc.Budget.Days[1]+2./24)
	}
}

// A job whose plan fits its server requests at most the server's memory.
func TestEmittedMemoryIsTheServers(t *testing.T) {
	for _, c := range []struct {
		memory string
		mib    string
		what   string
	}{
		{"4096MiB", `20\d\d`, "what its ranks take by the plan, and an eighth and 64 MiB more."},
		{"2000MB", "1907", `all that it has. Its ranks take 17\d\d MiB by the plan.`},
	} {
		r := command(append([]string{"plan"}, strings.Fields("--emit slurm --model gpt2 --gpu rtx-4090 --nodes 1 --gpus-per-node 1 --zero 3 --prefetch 0 "+
			"--precision bf16 --batch 1 --seq 64 --recompute none --offload optimizer=host --effort 4 --node-memory "+c.memory)...)...)
		require.Equal(t, cli.ExitDone, r.status, r.stderr)
		require.Regexp(t, "(?m)^# Memory of a server: "+c.what+"\n#SBATCH --mem="+c.mib+"M$", r.stdout)
	}
}

// A job without checkpoints cannot continue, so it is not retried.
func TestEmittedWithoutCheckpoints(t *testing.T) {
	for form, want := range map[string]string{"slurm": "#SBATCH --no-requeue\n", "jobset": "backoffLimit: 0\n          template:"} {
		r := command(append([]string{"plan"}, strings.Fields("--emit "+form+" --effort 4 --model "+testdata+
			"/gpt2 --seq 16 --nodes 1 --gpus-per-node 1 --checkpoint none")...)...)
		require.Equal(t, cli.ExitDone, r.status, r.stderr)
		require.Contains(t, r.stdout, want)
		require.NotRegexp(t, `--requeue|scontrol|--save-every|--resume|--restarts|podFailure|rules|130`, r.stdout)
		require.Regexp(t, `--checkpoint("\s+- ")? ?none`, r.stdout)
	}
}

// Different files have different paths in a pod, and one file has one.
func TestEmittedPathsDiffer(t *testing.T) {
	dir := t.TempDir()
	for _, name := range []string{"a", "b"} {
		require.NoError(t, os.CopyFS(filepath.Join(dir, name, "base"), os.DirFS(filepath.Join(testdata, "gpt2"))))
	}
	r := command(append([]string{"plan"}, words("--emit jobset --effort 4 --seq 16 --nodes 1 --gpus-per-node 1 --model "+dir+
		"/a/base --init "+dir+"/b/base --data x/train/data.bin --eval-data y/train/data.bin --template data.bin "+
		"--checkpoint 2-a --metrics a/run.json --receipt ./b/run.json --trace b/trace.json")...)...)
	require.Equal(t, cli.ExitDone, r.status, r.stderr)
	for flag, want := range map[string]string{"model": "/data/a-base", "init": "/data/b-base", "data": "/data/train-data.bin",
		"eval-data": "/data/2-train-data.bin", "template": "/data/data.bin", "checkpoint": "/runs/2-a",
		"metrics": "/runs/a-run.json", "receipt": "/runs/b-run.json", "trace": "/runs/trace.json"} {
		require.Equal(t, want, number(t, r.stdout, `- "--`+flag+`"\s+- "([^"]*)"`), flag)
	}
	r = command(append([]string{"plan"}, strings.Fields("--emit jobset --effort 4 --model "+testdata+"/gpt2 --init ./"+testdata+
		"/gpt2 --seq 16 --nodes 1 --gpus-per-node 1")...)...)
	require.Equal(t, cli.ExitDone, r.status, r.stderr)
	require.Equal(t, 3, strings.Count(r.stdout, `/gpt2"`), r.stdout)
	require.Equal(t, 2, strings.Count(r.stdout, `"/data/gpt2"`), r.stdout)
}

func TestEmitRefuses(t *testing.T) {
	tiny := "--model " + testdata + "/gpt2 --seq 16 "
	for _, c := range []struct {
		args   string
		status int
		want   string
	}{
		{tiny + "--emit pbs --nodes 1", cli.ExitBadInput, "--emit pbs: use slurm or jobset"},
		{tiny + "--emit slurm", cli.ExitBadInput, "--emit slurm: it is not said on which servers; give --nodes N --gpus-per-node N"},
		{tiny + "--emit slurm --gpu h100-80", cli.ExitBadInput, "it is not said on which servers"},
		{tiny + "--emit jobset --nodes 2", cli.ExitBadInput, "--emit jobset with --nodes 2"},
		{tiny + "--emit slurm --nodes 2 --json -", cli.ExitBadInput, "--emit slurm with --json -"},
		{tiny + "--emit slurm --nodes 2 --transport shm", cli.ExitBadInput, "--emit slurm with --transport shm"},
		{tiny + "--emit slurm --nodes 2 --gpu mi300x", cli.ExitBadInput, "--emit slurm: train does not run the plan: --device cuda runs on NVIDIA's GPUs alone"},
		{tiny + "--emit slurm --nodes 2 --gpu h100-80 --int8 reduce", cli.ExitBadInput, "--int8"},
		{tiny + "--emit slurm --nodes 1 --tokens 1e6 --steps 5", cli.ExitBadInput, "--emit slurm: --tokens 1e+06 with --steps 5: each says how long the run is"},
		{tiny + "--emit jobset --nodes 1 --tokens 1e6 --epochs 2", cli.ExitBadInput, "--tokens 1e+06 with --epochs 2"},
		{tiny + "--emit slurm --nodes 1 --device-memory 10KB", cli.ExitDoesNotFit, "nothing of "},
	} {
		r := command(append([]string{"plan"}, strings.Fields(c.args)...)...)
		require.Equal(t, c.status, r.status, "%s: %s", c.args, r.stderr)
		require.Contains(t, r.stderr, c.want, c.args)
		require.Empty(t, r.stdout, c.args)
	}
}

// number returns the first group of a pattern.
func number(t *testing.T, text, pattern string) string {
	t.Helper()
	m := regexp.MustCompile(pattern).FindStringSubmatch(text)
	require.NotNil(t, m, "%s in\n%s", pattern, text)
	return m[1]
}
