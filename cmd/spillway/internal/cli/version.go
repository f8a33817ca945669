package cli

import (
	"fmt"
	"runtime"
	"runtime/debug"

	"github.com/spf13/cobra"

	"github.com/spillway-ml/spillway/internal/dl"
)

// Releases set these: -ldflags "-X PACKAGE.version=v1.2.3 -X PACKAGE.commit=0123456789ab", where PACKAGE is this one.
var version, commit string

// VersionCommand is version.
func VersionCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "version",
		Short: "Print the version, the commit and the kind of this build",
		Args:  NoArguments,
		RunE: func(cmd *cobra.Command, _ []string) error {
			_, err := fmt.Fprintln(cmd.OutOrStdout(), "spillway", VersionText())
			return err
		},
	}
}

// Release is the version and the commit of this build, as far as it knows them.
func Release() string {
	v, at := version, commit
	if info, ok := debug.ReadBuildInfo(); ok {
		if v == "" && info.Main.Version != "(devel)" {
			v = info.Main.Version
		}
		changed := false
		for _, s := range info.Settings {
			switch s.Key {
			case "vcs.revision":
				at = s.Value[:min(12, len(s.Value))]
			case "vcs.modified":
				changed = s.Value == "true"
			}
		}
		if at != "" && changed {
			at += " with changes"
		}
	}
	if v == "" {
		v = "development version"
	}
	if at != "" {
		v += " (" + at + ")"
	}
	return v
}

// VersionText is what version and --version print after the command's name: the release
// or the module's version, the commit if the build knows it, Go, the platform, and what
// this build can use.
func VersionText() string {
	v := Release()
	kind := "CPU only, static"
	switch {
	case dl.Err() == nil:
		kind = "CPU, GPU and MPI"
	case runtime.GOOS != "linux":
		kind = "CPU only"
	}
	return fmt.Sprintf("%s, %s, %s/%s, %s", v, runtime.Version(), runtime.GOOS, runtime.GOARCH, kind)
}
