package cli

import (
	"fmt"
	"runtime"

	"github.com/spf13/cobra"

	"github.com/spillway-ml/spillway/internal/dl"
	"github.com/spillway-ml/spillway/internal/release"
)

// VersionCommand returns the command version.
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

// VersionText returns the text of version and --version after the command's name: the release or
// the module's version, the commit if the build has it, Go, the platform, and the devices and
// transports of this build.
func VersionText() string {
	v := release.Text()
	kind := "CPU only, static"
	switch {
	case dl.Err() == nil:
		kind = "CPU, GPU and MPI"
	case runtime.GOOS != "linux":
		kind = "CPU only"
	}
	return fmt.Sprintf("%s, %s, %s/%s, %s", v, runtime.Version(), runtime.GOOS, runtime.GOARCH, kind)
}
