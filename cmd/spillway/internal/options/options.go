// Package options defines train's flags and checks their values before a run.
package options

import (
	"cmp"
	"fmt"
	"net"
	"strconv"
	"strings"

	"github.com/spf13/pflag"

	"github.com/spillway-ml/spillway/cluster"
	"github.com/spillway-ml/spillway/cmd/spillway/internal/cli"
	"github.com/spillway-ml/spillway/config"
	"github.com/spillway-ml/spillway/planner"
)

// ListenAddress returns the address that --metrics-addr means. A missing host is the loopback of
// this machine.
func ListenAddress(addr string) (string, error) {
	wrong := fmt.Errorf("--metrics-addr %.80q: want HOST:PORT or PORT", addr)
	if !strings.Contains(addr, ":") {
		addr = ":" + addr
	}
	host, port, err := net.SplitHostPort(addr)
	if err != nil {
		return "", wrong
	}
	if n, err := strconv.Atoi(port); err != nil || n < 0 || n > 65535 {
		return "", wrong
	}
	if host == "" {
		host = "127.0.0.1"
	}
	return net.JoinHostPort(host, port), nil
}

// checkAddress rejects an invalid --metrics-addr before the run begins.
func checkAddress(addr string) error {
	if addr == "" {
		return nil
	}
	_, err := ListenAddress(addr)
	return err
}

// RefuseUnderOne rejects given counts below 1. Internally 0 means that the flag was not given.
func RefuseUnderOne(fs *pflag.FlagSet) error {
	for _, f := range []struct{ flag, what, without string }{
		{"seq", "token", "the smaller of 256 and the model's positions"},
		{"global-batch", "row", "--batch and --accum as they are"},
		{"epochs", "epoch", "--steps"},
		{"shard-size", "rank", "all ranks"},
		{"tensor", "rank", "whole layers"},
		{"pipeline", "stage", "one stage"},
	} {
		if n, err := fs.GetInt(f.flag); err == nil && fs.Changed(f.flag) && n < 1 {
			return fmt.Errorf("--%s %d: at least 1 %s is needed; leave it out for %s", f.flag, n, f.what, f.without)
		}
	}
	return nil
}

// MinRanks returns --min-ranks, which may be in a config file that is fully read later.
func MinRanks(flags *pflag.FlagSet) (n int) {
	if path := flags.Lookup("config").Value.String(); path != "" && !flags.Changed("min-ranks") {
		flags = TrainSet()
		_ = cli.ApplyConfigFile(flags, path) // rank 0 reports the error
	}
	n, _ = flags.GetInt("min-ranks")
	return n
}

// refuseEpochs rejects --epochs with --steps: each gives the length of the run.
func refuseEpochs(fs *pflag.FlagSet) error {
	if fs.Changed("epochs") && fs.Changed("steps") {
		return fmt.Errorf("--epochs %s with --steps %s: each says how long the run is; leave one out", fs.Lookup("epochs").Value, fs.Lookup("steps").Value)
	}
	return nil
}

// JobFlags binds the flags of jobs over processes and returns the value of --transport.
func JobFlags(fs *pflag.FlagSet, c *config.Config) (transport *string) {
	fs.IntVar(&c.ShardSize, "shard-size", 0, "shard over groups of `N` ranks and replicate over the groups (HSDP; in bf16 and fp16 the last bits differ from other group sizes; default: shard over all)")
	MeshFlags(fs, c)
	fs.IntVar(&c.LocalRanks, "ranks-per-process", 0, "ranks of each process; --ranks is then the total and may be left out (default: 1 in a job over processes)")
	transport = fs.String("transport", cluster.Auto, "transport between ranks: auto, inproc (one process), shm (spillway launch), mpi (mpirun) or nccl (--device cuda over processes)")
	fs.Int("min-ranks", 0, "if processes are lost, continue from --checkpoint with at least `M` ranks; only for jobs over NCCL alone (NCCL_COMM_ID), with NCCL 2.27 or later (other jobs: launch --min-ranks)")
	return transport
}

// MeshFlags binds the flags of tensor and pipeline parallelism.
func MeshFlags(fs *pflag.FlagSet, c *config.Config) {
	fs.IntVar(&c.Tensor, "tensor", 1,
		"divide every layer over groups of `T` neighbouring ranks, a power of two, which get the same data (tensor parallelism; CPU ranks)")
	fs.IntVar(&c.TensorSlices, "tensor-slices", 0,
		"cut layers into `S` slices, a power of two; every --tensor that divides it gives the same bits (default: --tensor)")
	fs.IntVar(&c.Pipeline, "pipeline", 1,
		"divide the layers over `P` stages with equal numbers of ranks, which process the --accum micro-batches in turn (pipeline parallelism; CPU ranks, --zero 0 or 1)")
	fs.StringVar(&c.PipelineSchedule, "pipeline-schedule", "1f1b",
		"order of the micro-batches in a pipeline: 1f1b (a stage keeps the activations of at most --pipeline micro-batches) or gpipe (all forwards, then all backwards)")
	fs.StringVar(&c.Stages, "stages", "", "layers of each stage of a pipeline in turn, as in 0-5,6-11 (default: divided by predicted time)")
}

// FollowPipeline sets ZeRO stage 1 in a pipeline if --zero is not given: stage 3 is not supported.
func FollowPipeline(fs *pflag.FlagSet, c *config.Config) {
	if c.Pipelined() && !fs.Changed("zero") {
		c.Zero = 1
	}
}

// TrainSet returns a set of train's flags that belongs to no command, for callers that read some.
func TrainSet() *pflag.FlagSet {
	fs := pflag.NewFlagSet("train", pflag.ContinueOnError)
	var c config.Config
	Train(fs, &c, &Later{})
	JobFlags(fs, &c)
	return fs
}

// Meeting returns the transport and the device that the flags and the config file give. The file is
// fully read later, once the ranks have met; rank 0 then reports its errors.
func Meeting(fs *pflag.FlagSet, path string) (transport, device string, err error) {
	both := TrainSet()
	for _, name := range []string{"transport", "device"} {
		if f := fs.Lookup(name); f.Changed {
			_ = both.Set(name, f.Value.String()) // never fails: both flags accept any text
		}
	}
	err = cli.ApplyConfigFile(both, path)
	return both.Lookup("transport").Value.String(), both.Lookup("device").Value.String(), err
}

// FixedBy returns the settings that the command line gives and --fit must not change.
func FixedBy(fs *pflag.FlagSet) planner.Fixed {
	return planner.Fixed{Zero: fs.Changed("zero"), Prefetch: fs.Changed("prefetch"), Batch: fs.Changed("batch"), Accum: fs.Changed("accum"),
		AccumOrder: fs.Changed("accum-order"), Precision: fs.Changed("precision"), Recompute: fs.Changed("recompute"), Offload: fs.Changed("offload")}
}

// Settle applies the config file or the demo's values to the flags that were not given. It rejects
// unsupported values.
func Settle(fs *pflag.FlagSet, c *config.Config, l *Later) (isDemo bool, err error) {
	isDemo = !fs.Changed("model") && !fs.Changed("data") && !fs.Changed("config")
	demoGlob := isDemo && !fs.Changed("data-glob")
	defer func() {
		if !demoGlob { // the demo's pattern selects Go files and does not apply to --eval-data
			c.EvalGlob = c.DataGlob
		}
	}()
	if isDemo {
		if !fs.Changed("checkpoint") { // the mark lets the next demo replace it; a folder that the user names is kept
			c.CheckpointMark = DemoMark
		}
		if err := ApplyDemo(fs); err != nil {
			return true, err
		}
	}
	if path := fs.Lookup("config").Value.String(); path != "" {
		if err := cli.ApplyConfigFile(fs, path); err != nil {
			return false, err
		}
	}
	if err := cmp.Or(RefuseUnderOne(fs), l.Refuse()); err != nil {
		return isDemo, err
	}
	FollowPipeline(fs, c)
	return isDemo, cmp.Or(refuseEpochs(fs), c.Validate(), checkAddress(c.MetricsAddr), cli.RefuseOverwriting(fs), l.refuseExport(c), l.refuseAllow(c))
}
