package ctl

import (
	"github.com/spf13/cobra"
	clientv3 "go.etcd.io/etcd/client/v3"
)

func (t *tool) alarmCommand() *cobra.Command {
	c := t.group("alarm", "Alarm related commands")
	c.AddCommand(&cobra.Command{
		Use:   "list",
		Short: "Lists all alarms",
		RunE: func(c *cobra.Command, args []string) error {
			if len(args) > 0 {
				return badArguments("alarm list command accepts no arguments")
			}
			return t.alarms(c, func(client *clientv3.Client) (*clientv3.AlarmResponse, error) {
				ctx, cancel := t.commandContext()
				defer cancel()
				return client.AlarmList(ctx)
			})
		},
	}, &cobra.Command{
		Use:   "disarm",
		Short: "Disarms all alarms",
		RunE: func(c *cobra.Command, args []string) error {
			if len(args) > 0 {
				return badArguments("alarm disarm command accepts no arguments")
			}
			return t.alarms(c, func(client *clientv3.Client) (*clientv3.AlarmResponse, error) {
				ctx, cancel := t.commandContext()
				defer cancel()
				return client.AlarmDisarm(ctx, &clientv3.AlarmMember{}) // all of all members
			})
		},
	})
	return c
}

func (t *tool) alarms(c *cobra.Command, ask func(*clientv3.Client) (*clientv3.AlarmResponse, error)) error {
	client, p, err := t.connect(c)
	if err != nil {
		return err
	}
	defer closeClient(client)
	r, err := ask(client)
	if err != nil {
		return err
	}
	return p.alarms(r)
}
