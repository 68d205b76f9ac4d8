"""Which words does slurm.conf know?  The keys of Slurm 20.11 to 25.11, so that a typo is found before a daemon dies of it.

Source: slurm.conf(5) and the option table of src/common/read_config.c.  A key that this list knows and the installed
release does not is refused by slurmctld itself, and `sandbox up` shows its words.
"""

from __future__ import annotations

from slurm_resilience.errors import ConfigError, nearest

_CLUSTER_WORDS = """
    AccountingStorageBackupHost AccountingStorageEnforce AccountingStorageExternalHost AccountingStorageHost
    AccountingStorageParameters AccountingStoragePass AccountingStoragePort AccountingStorageTRES AccountingStorageType
    AccountingStorageUser AccountingStoreFlags AcctGatherEnergyType AcctGatherFilesystemType AcctGatherInterconnectType
    AcctGatherNodeFreq AcctGatherProfileType AllowSpecResourcesUsage AuthAltParameters AuthAltTypes AuthInfo AuthType
    BatchStartTimeout BcastExclude BcastParameters BurstBufferType CertgenParameters CertgenType CertmgrParameters
    CertmgrType CliFilterParameters CliFilterPlugins ClusterName CommunicationParameters CompleteWait CoreSpecPlugin
    CpuFreqDef CpuFreqGovernors CredType DataParserParameters DebugFlags DefCpuPerGPU DefMemPerCPU DefMemPerGPU DefMemPerNode
    DependencyParameters DisableRootJobs EioTimeout EnforcePartLimits Epilog EpilogMsgTime EpilogSlurmctld EpilogTimeout
    ExtSensorsFreq ExtSensorsType FairShareDampeningFactor FederationParameters FirstJobId GetEnvTimeout GpuFreqDef
    GresTypes GroupUpdateForce GroupUpdateTime HashPlugin HealthCheckInterval HealthCheckNodeState HealthCheckProgram
    HttpParserType InactiveLimit InteractiveStepOptions JobAcctGatherFrequency JobAcctGatherParams JobAcctGatherType
    JobCompHost JobCompLoc JobCompParams JobCompPass JobCompPassScript JobCompPort JobCompType JobCompUser JobContainerType
    JobDefaults JobFileAppend JobRequeue JobSubmitPlugins KeepAliveTime KillOnBadExit KillWait LaunchParameters
    Licenses LogTimeFormat MailDomain MailProg MaxArraySize MaxBatchRequeue MaxDBDMsgs MaxJobCount MaxJobId MaxMemPerCPU
    MaxMemPerNode MaxNodeCount MaxStepCount MaxTasksPerNode MCSParameters MCSPlugin MessageTimeout MetricsType MinJobAge
    MpiDefault MpiParams NamespaceType NodeFeaturesPlugins OverTimeLimit PluginDir PlugStackConfig PowerParameters PowerPlugin
    PreemptExemptTime PreemptMode PreemptParameters PreemptType PrEpParameters PrEpPlugins PriorityCalcPeriod
    PriorityDecayHalfLife PriorityFavorSmall PriorityFlags PriorityMaxAge PriorityParameters PrioritySiteFactorParameters
    PrioritySiteFactorPlugin PriorityType PriorityUsageResetPeriod PriorityWeightAge PriorityWeightAssoc
    PriorityWeightFairshare PriorityWeightJobSize PriorityWeightPartition PriorityWeightQOS PriorityWeightTRES PrivateData
    ProctrackType Prolog PrologEpilogTimeout PrologFlags PrologSlurmctld PrologTimeout PropagatePrioProcess
    PropagateResourceLimits PropagateResourceLimitsExcept RebootProgram ReconfigFlags RequeueExit RequeueExitHold
    ResumeFailProgram ResumeProgram ResumeRate ResumeTimeout ResvEpilog ResvOverRun ResvProlog ReturnToService RoutePlugin
    SchedulerParameters SchedulerTimeSlice SchedulerType ScronParameters SelectType SelectTypeParameters SlurmctldAddr
    SlurmctldDebug SlurmctldHost SlurmctldLogFile SlurmctldParameters SlurmctldPidFile SlurmctldPlugstack SlurmctldPort
    SlurmctldPrimaryOffProg SlurmctldPrimaryOnProg SlurmctldSyslogDebug SlurmctldTimeout SlurmdDebug SlurmdLogFile
    SlurmdParameters SlurmdPidFile SlurmdPort SlurmdSpoolDir SlurmdSyslogDebug SlurmdTimeout SlurmdUser SlurmSchedLogFile
    SlurmSchedLogLevel SlurmUser SrunEpilog SrunPortRange SrunProlog StateSaveLocation SuspendExcNodes SuspendExcParts
    SuspendExcStates SuspendProgram SuspendRate SuspendTime SuspendTimeout SwitchParameters SwitchType TaskEpilog TaskPlugin
    TaskPluginParam TaskProlog TCPTimeout TLSParameters TLSType TmpFS TopologyParam TopologyPlugin TrackWCKey TreeWidth
    UnkillableStepProgram UnkillableStepTimeout UrlParserType UsePAM VSizeFactor WaitTime X11Parameters
"""
CLUSTER = frozenset(_CLUSTER_WORDS.split())

_PARTITION_WORDS = """
    AllocNodes AllowAccounts AllowGroups AllowQos Alternate CpuBind Default DefaultTime DefCpuPerGPU DefMemPerCPU
    DefMemPerGPU DefMemPerNode DenyAccounts DenyQos DisableRootJobs ExclusiveTopo ExclusiveUser GraceTime Hidden JobDefaults
    LLN MaxCPUsPerNode MaxCPUsPerSocket MaxMemPerCPU MaxMemPerNode MaxNodes MaxTime MinNodes Nodes OverSubscribe
    OverTimeLimit PowerDownOnIdle PreemptMode PriorityJobFactor PriorityTier QOS ReqResv ResumeTimeout RootOnly
    SelectTypeParameters State SuspendTime SuspendTimeout TopologyPlugin TRESBillingWeights
"""
PARTITION = frozenset(_PARTITION_WORDS.split())

# What the sandbox itself stands on; another value would cut the branch off.
OURS = {
    "AuthType": "the sandbox has a munge daemon of its own",
    "AuthInfo": "it names the socket of the sandbox's own munge daemon; set cred_expire as AuthInfo.cred_expire",
    "ClusterName": "it is the name that accounting knows",
    "SlurmctldHost": "it is the sandbox's control host",
    "SlurmctldAddr": "it is the sandbox's control host",
    "SlurmdSpoolDir": "each node needs a folder of its own",
    "StateSaveLocation": "it is in the sandbox's folder",
    "SlurmUser": "it is Debian's slurm",
    "SlurmdUser": "slurmd must be root to run jobs as others",
    "SlurmctldLogFile": "`sandbox status` names the logs",
    "SlurmdLogFile": "`sandbox status` names the logs",
    "SlurmctldPidFile": "it is in the sandbox's folder",
    "SlurmdPidFile": "it is in the sandbox's folder",
    "AccountingStorageType": "use --no-accounting",
    "AccountingStorageHost": "it is the sandbox's control host",
}


def canonical(key: str) -> str:
    """Slurm's own spelling of a key (``GraceTime``, ``low.GraceTime``), whatever its case.

    Raises :class:`ConfigError` that names the nearest key when there is none, or why it cannot be set.
    """
    scope, dot, word = key.partition(".")
    if dot and scope.lower() == "authinfo":
        if word.lower() not in ("cred_expire", "ttl"):
            raise ConfigError(f"unknown setting {key!r}: {nearest(word, ['cred_expire', 'ttl'])}")
        return f"AuthInfo.{word.lower()}"
    if dot:
        if scope not in ("low", "high"):
            raise ConfigError(f"unknown partition in {key!r}: {nearest(scope, ['low', 'high'])}")
        return f"{scope}.{_find(word, PARTITION, key)}"
    found = _find(word or key, CLUSTER | {"GraceTime"}, key) if not dot else key
    if found in OURS:
        raise ConfigError(f"{found} cannot be set in a sandbox", evidence=OURS[found])
    return f"low.{found}" if found == "GraceTime" else found


def _find(word: str, words: frozenset[str], key: str) -> str:
    by_lower = {known.lower(): known for known in words}
    found = by_lower.get(word.lower())
    if found is not None:
        return found
    where = "a partition of slurm.conf" if words is PARTITION else "slurm.conf"
    import difflib

    close = difflib.get_close_matches(word.lower(), by_lower, n=1, cutoff=0.6)
    hint = f"did you mean {by_lower[close[0]]!r}?" if close else "see slurm.conf(5)"
    raise ConfigError(f"unknown setting {key!r}: {hint}", evidence=f"it is no key of {where}")
