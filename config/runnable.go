package config

import "strings"

// Runnable refuses configurations that can be planned but not run, and names the field.
func (cfg *Config) Runnable() error {
	if !strings.EqualFold(cfg.Device, "cuda") {
		return nil
	}
	switch tensor, o := "Config."+cfg.slicedBy(), cfg.UpdateRule(); {
	case cfg.Receipt != "":
		return Refuse("Config.Receipt with Config.Device cuda: no GPU has run it yet; leave it out, or give Config.Device cpu")
	case cfg.Slices() > 0 && cfg.Pipelined():
		return Refuse("%s and Config.Pipeline with Config.Device cuda: no GPU has run them yet; leave them out, or give Config.Device cpu", tensor)
	case cfg.Slices() > 0:
		return Refuse("%s with Config.Device cuda: no GPU has run it yet; leave it out, or give Config.Device cpu", tensor)
	case cfg.Pipelined():
		return Refuse("Config.Pipeline with Config.Device cuda: no GPU has run it yet; leave it out, or give Config.Device cpu")
	case cfg.LoRA.Active():
		return Refuse("Config.LoRA with Config.Device cuda: no GPU has run it yet; leave it out, or give Config.Device cpu")
	case cfg.Packs():
		return Refuse("Config.Packing on with Config.Device cuda: the GPU's kernels take rows of one document; leave it out, or give Config.Device cpu")
	case cfg.Inference && cfg.Generate && cfg.Batch > 1:
		return Refuse("Config.Batch %d with Config.Device cuda: generation keeps no keys and values on a GPU, so that it follows one row; leave it out, or give Config.Device cpu", cfg.Batch)
	case len(cfg.Int8) > 0:
		return Refuse("Config.Int8 with Config.Device cuda: the GPU's kernels have none; leave it out")
	case cfg.BF16States():
		return Refuse("Config.OptimizerDType bf16 with Config.Device cuda: the GPU's kernels have none; leave it out")
	case o.HostOnly():
		return Refuse("Config.Optimizer %.80s with Config.Device cuda: it has no kernel for GPUs; use another optimizer, or Config.Device cpu", o.Name)
	}
	return nil
}
