package model

import "slices"

// Family names an architecture.
type Family string

// Arch is an architecture. Its config.json keys, tensor names, forward program and published
// models are in one file of this package. A new architecture needs such a file, a row of archs,
// and its own fields in Config.
type Arch struct {
	Family     Family
	Types      []string // the values of model_type in config.json
	Classifier bool     // samples have one target; there are no tokens and no config.json
	Dropout    bool     // whether it supports dropout in training
	CPUOnly    string   // why it can't run on a GPU, although it can be planned; "": it can run
	Presets    []Preset

	defaults func(*Config)                            // fills in the defaults of zero fields
	check    func(Config) error                       // checks its sizes
	forward  func(*writer)                            // writes the program
	read     func(o *object, modelType string) Config // from config.json
	write    func(Config, *orderedMap)                // to config.json, without the keys common to all architectures
}

var archs = []*Arch{&gpt2Arch, &llamaArch, &gemma2Arch, &mlpArch, &cnnArch}

// archOf returns the architecture of a family; nil for an unknown one.
func archOf(f Family) *Arch {
	i := slices.IndexFunc(archs, func(a *Arch) bool { return a.Family == f })
	if i < 0 {
		return nil
	}
	return archs[i]
}

// Arch returns the architecture of c; nil for an unknown family.
func (c Config) Arch() *Arch { return archOf(c.Family) }

// families lists the known families for an error.
func families() (names []string) {
	for _, a := range archs {
		names = append(names, string(a.Family))
	}
	return names
}
